"""by-layer: what is made of one layer's results alone stands behind its call, what only one layer reads before it.

A model may look at what all its layers gave after the last of them: losses of routers (transformers'
`output_router_logits`), statistics, a sum of all hidden states. In the order of its text these are runs of nodes, one
for each layer, far from the layers, and again before their gradients:

    %a = call(…) {callee = "layer.fwd"}                  %a = call(…) {callee = "layer.fwd"}
    %b = call(…) {callee = "layer.fwd"}                  %p = aten.softmax(%a)
    …                                            ==>     %b = call(…) {callee = "layer.fwd"}
    %p = aten.softmax(%a)                                %q = aten.softmax(%b)
    %q = aten.softmax(%b)                                …

Beside the layers they are the same in every turn, so that `step.py` has one loop of them, and what they read dies at
once. Nodes keep their order otherwise; constants that moved nodes read go before the first call. Nodes move towards the
call that reads what they give only if that keeps no more memory: what they read last is no larger than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from mgraph.ir.dims import evaluate, names_in
from mgraph.ir.graph import Function, Module, Node, Value
from mgraph.ir.ops.cost import value_bytes
from mgraph.ir.types import PendingType
from mgraph.passes.base import Pass, Report, Stage, Tier
from mgraph.passes.calls import callee, calls
from mgraph.passes.differentiation import VIEWS

_EXTENT = 4096
"""A named dim, where sizes are compared."""
_SMALL = 2**16
"""Bytes of which it does not matter how long they live."""
_MORE = 1.125
"""How much larger than what is given what is kept may be: by what is one number for a row."""
FIRST, ANY, LAST = 0, 1, 2


@dataclass(frozen=True)
class ByLayer(Pass):
    """Put what belongs to one call of a layer beside it."""

    name: ClassVar[str] = "by-layer"
    stage: ClassVar[Stage] = Stage.SCHEDULE
    tier: ClassVar[Tier] = Tier.BITWISE
    conflicts: ClassVar[frozenset[str]] = frozenset({"in-place"})

    def run(self, module: Module, report: Report) -> Module:
        """Sort the nodes of every function that calls others; a module in which none moves is returned as it is."""
        for function in module.functions.values():
            order = _Order(function)
            if order.moved:
                module = module.with_function(replace(function, nodes=tuple(order.sorted())))
                report.match(
                    function.name, order.moved[0].id, f"nodes that stand beside their layer: {len(order.moved)}"
                )
        return module


class _Order:
    """The parts of a function between its calls, and in which of them each node stands: part p is before call p."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.makers, self.users, self.calls = function.producers(), function.users(), calls(function)
        self.part: dict[Node, int] = {}
        self.side: dict[Node, int] = {}
        """Whether a node stands at the begin of its part (behind a call), at the end (before one), or between."""
        self.moved: list[Node] = []
        part = 0
        for node in function.nodes:
            self.part[node] = part
            part += node.op == "call"
        self.behind, before = self._behind(), self._before()
        # What the backward makes of a forward's values is as large, and would live all along.
        self.ready = {n: part for n, part in self.behind.items() if part and self.calls[part - 1].phase is n.phase}
        early = dict.fromkeys(node for node in self._alike(self.ready, -1) if self._go(node))
        late: dict[int, list[Node]] = {}
        for node in self._alike({n: part for n, part in before.items() if n not in early}, 0):
            late.setdefault(before[node], []).append(node)
        for part, nodes in late.items():
            self._wait(nodes, part)
        for node in early:
            self._begin(node)

    def sorted(self) -> list[Node]:
        """The nodes in their new order."""
        place = {node: index for index, node in enumerate(self.function.nodes)}
        return sorted(
            self.function.nodes,
            key=lambda node: (self.part[node], 3 if node.op == "call" else self.side.get(node, ANY), place[node]),
        )

    def _behind(self) -> dict[Node, int]:
        """Of each node that could move: the first part that has all it is made of, 0 for constants."""
        found: dict[Node, int] = {}
        for node in self.function.nodes:
            if self._may_move(node):
                made = self._made_of(node)
                found[node] = max((found.get(m, self.part[m] + (m.op == "call")) for m in made), default=0)
        return found

    def _before(self) -> dict[Node, int]:
        """Of each node that one call alone needs: the part before that call."""
        found: dict[Node, int] = {}
        for node in reversed(self.function.nodes):
            parts = {self.part[r] if r.op == "call" else found.get(r, -1) for r in self._readers(node)}
            if self._may_move(node) and len(parts) == 1 and -1 not in parts:
                found[node] = parts.pop()
        return found

    def _alike(self, parts: dict[Node, int], call: int) -> list[Node]:
        """The nodes that calls of one function have each: by the call at this distance from a part."""
        groups: dict[object, list[Node]] = {}
        for node in self.function.nodes:
            number = parts.get(node, 0) + call
            if node in parts and 0 <= number < len(self.calls):
                origin = node.origin.file, node.origin.line, node.phase, node.op, len(node.operands)
                groups.setdefault((callee(self.calls[number]), *origin), []).append(node)
        several = [group for group in groups.values() if len({parts[node] for node in group}) > 1]
        apart = [group for group in several if any(parts[node] != self.part[node] for node in group)]
        chosen = {node for group in apart for node in group}
        return [node for node in self.function.nodes if node in chosen]

    def _go(self, node: Node) -> bool:
        """Move a node to the first part that has all it is made of, and constants among that before the first call.
        Whether it stands there."""
        made = self._made_of(node)
        for maker in made:
            late = self.behind.get(maker) != 0 and self.part[maker] + (maker.op == "call") > self.behind[node]
            if late and not (maker in self.ready and self._go(maker)):
                return False
        for maker in made:
            self._hoist(maker)
        self._move(node, self.behind[node])
        return True

    def _wait(self, nodes: Sequence[Node], part: int) -> None:
        """Move nodes to the part before the call that needs them: to its end where nothing else there reads them."""
        together: set[Node] = set()
        for node in reversed(nodes):
            if all(reader in together or self.part[reader] == part for reader in self._readers(node)):
                together.add(node)
        if not self._keep_no_more(together, part):
            return
        for node in (node for node in reversed(nodes) if node in together):
            self._move(node, part)
            if all(reader.op == "call" or self.side.get(reader) == LAST for reader in self._readers(node)):
                self.side[node] = LAST

    def _made_of(self, node: Node) -> list[Node]:
        return [self.makers[value] for value in node.operands if value in self.makers]

    def _readers(self, node: Node) -> list[Node]:
        return [reader for value in node.results for reader in self.users.get(value, [])]

    def _move(self, node: Node, part: int) -> None:
        if self.part[node] != part:
            self.part[node] = part
            self.moved.append(node)

    def _hoist(self, node: Node) -> None:
        """Put a constant, with what it is made of, before the first call."""
        if self.behind.get(node) == 0 and self.part[node] > 0:
            self.part[node] = 0
            for maker in self._made_of(node):
                self._hoist(maker)

    def _keep_no_more(self, nodes: set[Node], part: int) -> bool:
        """Whether what nodes read and would keep until a part is no larger than what they give, which would not be
        there until then."""
        read = {self._memory(value) for node in nodes for value in node.operands if not value.is_state}
        longer = [v for v in read if self.makers.get(v) not in nodes and self._last_read(v, nodes) < part]
        given = [v for node in nodes for v in node.results if any(r not in nodes for r in self.users.get(v, []))]
        return sum(map(_bytes, longer)) <= _MORE * sum(map(_bytes, given))

    def _memory(self, value: Value) -> Value:
        """The value that a view is of."""
        maker = self.makers.get(value)
        return self._memory(maker.operands[0]) if maker is not None and maker.op in VIEWS else value

    def _last_read(self, value: Value, besides: set[Node]) -> int:
        if value in self.function.params or value in self.function.results:
            return len(self.calls)
        return max((self.part[reader] for reader in self.users[value] if reader not in besides), default=-1)

    def _begin(self, node: Node) -> None:
        """Let a node be at the begin of its part, with what it needs there."""
        if self.side.get(node) != FIRST:
            self.side[node] = FIRST
            for maker in self._made_of(node):
                if maker.op != "call" and self.part[maker] == self.part[node]:
                    self._begin(maker)

    def _may_move(self, node: Node) -> bool:
        """Whether a node is no call, makes no result, and neither begins a message nor waits for one."""
        values = (*node.operands, *node.results)
        if node.op == "call" or any(value in self.function.results for value in node.results):
            return False
        return not any(isinstance(value.type, PendingType) for value in values)


def _bytes(value: Value) -> int:
    """Bytes, with large named dims; 0 of what is small."""
    size = value_bytes(value)
    count = int(evaluate(size, dict.fromkeys(names_in(size), _EXTENT)))
    return count if count > _SMALL else 0
