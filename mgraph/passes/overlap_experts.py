"""overlap-experts: other work runs while tokens are on their way to experts and back.

    %x_sent, … = all_to_all(%x_packed, …) {axis = "ep"}         ==>   %p, … = all_to_all_start(%x_packed, …)
    %shared = call @shared(%x)                                        %shared = call @shared(%x)
    %y = …(%x_sent)                                                   %x_sent, … = wait(%p, …)
                                                                      %y = …(%x_sent)

The nodes of each function that sends tokens are put into an order in which

* what is sent starts as soon as it is there, and what that is made of comes before all else;
* nothing is waited for as long as anything else can run: shared experts, gradients of experts' weights, and, where the
  tokens are sent in chunks (`expert-dispatch`), the experts of another chunk. Sums over ranks that only losses read
  (`joint-losses`) are treated alike, so that they hold up no tokens.

Communication runs on a stream of its own (`runtime/collectives.py`), of which `wait` is the end. It is the same order
on all ranks, as they run one program, and each node computes what it did.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.graph import Function, Module, Node, Value
from mgraph.ir.opdef import op_def
from mgraph.ir.types import PendingType
from mgraph.passes.base import Pass, Report, Stage, Tier
from mgraph.passes.data_parallel import DataParallel
from mgraph.passes.expert_parallel import ExpertParallel
from mgraph.passes.fully_shard import FullyShard

SENDING = ("all_gather", "all_to_all", "reduce_scatter")
"""The collectives by which `expert-parallel` sends tokens."""


@dataclass(frozen=True)
class OverlapExperts(Pass):
    """Split what sends tokens into start and end, and order all else in between."""

    name: ClassVar[str] = "overlap-experts"
    stage: ClassVar[Stage] = Stage.SCHEDULE
    tier: ClassVar[Tier] = Tier.BITWISE
    requires: ClassVar[frozenset[str]] = frozenset({"expert-parallel"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"in-place"})

    def run(self, module: Module, report: Report) -> Module:
        """Rewrite each function that sends tokens."""
        functions = dict(module.functions)
        for name, function in module.functions.items():
            sending = [node for node in function.nodes if _sends_tokens(node)]
            if sending:
                functions[name] = replace(function, nodes=tuple(_ordered(_split(function))))
                report.match(name, sending[0].id, f"{len(sending)} messages start early")
        return replace(module, functions=functions)


def _sends_tokens(node: Node) -> bool:
    return node.op in SENDING and node.made_by == ExpertParallel.name


def _sends(node: Node) -> bool:
    """Whether a node sends tokens, or adds up over data ranks what only losses read, which has time."""
    return _sends_tokens(node) or (node.op == "all_reduce" and node.made_by in (DataParallel.name, FullyShard.name))


def _split(function: Function) -> list[Node]:
    """The nodes, where what sends tokens is two."""
    names = FunctionBuilder(function.name, "", function.names())
    nodes: list[Node] = []
    for node in function.nodes:
        if not _sends(node):
            nodes.append(node)
            continue
        pending = tuple(Value(names.fresh("pending"), PendingType(v.tensor)) for v in node.results)
        start = replace(node, op=f"{node.op}_start", results=pending, made_by=OverlapExperts.name)
        nodes += [start, replace(node, op="wait", operands=pending, attrs={}, made_by=OverlapExperts.name)]
    return nodes


def _ordered(nodes: Sequence[Node]) -> list[Node]:
    """The nodes in an order of their own, each behind those that make what it reads.

    Of those that can run: a start, else what a start needs, else any other, else a wait; the first of its kind.
    """
    made = {v: index for index, node in enumerate(nodes) for v in node.results}
    needs = [{made[v] for v in node.operands if v in made} for node in nodes]
    _fence(nodes, needs)
    kinds = _kinds(nodes, needs)
    readers: dict[int, list[int]] = {}
    for index, before in enumerate(needs):
        for other in before:
            readers.setdefault(other, []).append(index)
    missing = [len(before) for before in needs]
    ready = [(kinds[index], index) for index, count in enumerate(missing) if count == 0]
    heapq.heapify(ready)
    order: list[Node] = []
    while ready:
        _, index = heapq.heappop(ready)
        order.append(nodes[index])
        for reader in readers.get(index, ()):
            missing[reader] -= 1
            if missing[reader] == 0:
                heapq.heappush(ready, (kinds[reader], reader))
    assert len(order) == len(nodes), "a graph has no cycles"
    return order


def _fence(nodes: Sequence[Node], needs: Sequence[set[int]]) -> None:
    """Other communication (layers' parameters that are gathered, sums over tp) stays where it is among what sends
    tokens: it has been placed for a reason."""
    sending: list[int] = []
    fence: int | None = None
    for index, node in enumerate(nodes):
        if node.made_by == OverlapExperts.name:
            needs[index].update(() if fence is None else (fence,))
            sending.append(index)
        elif node.op == "wait" or op_def(node.op).collective:
            needs[index].update(sending if fence is None else (*sending, fence))
            sending, fence = [], index


START, LEADING, OTHER, WAIT = range(4)


def _kinds(nodes: Sequence[Node], needs: Sequence[set[int]]) -> Mapping[int, int]:
    """When each node comes; what leads to a start is found from the last node on."""
    kinds = {index: WAIT if node.op == "wait" else OTHER for index, node in enumerate(nodes)}
    leads: set[int] = set()
    for index in range(len(nodes) - 1, -1, -1):
        starts = nodes[index].op.endswith("_start") and nodes[index].made_by == OverlapExperts.name
        if starts or index in leads:
            leads |= needs[index]
        if starts:
            kinds[index] = START
        elif index in leads and kinds[index] is OTHER:
            kinds[index] = LEADING
    return kinds
