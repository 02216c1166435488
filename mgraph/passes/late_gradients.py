"""late-gradients: a layer's last gradient of weights waits until the tokens of the next layer are on their way.

    func @layer.bwd(…; %q.grad, …)                         func @layer.bwd(…; %q.grad, …)
      …                                                      …
      %d = aten.mm.default(%dq, %x)                ==>       %d = aten.mm.default(%dq, %x)
      %grad_q = accumulate(%q.grad, %d)                      %grad_q = accumulate(%q.grad, %d) {late = true}

A backward that sends tokens begins with a message, beside which it has nothing to do: all of it depends on what comes
back. The gradients of weights of the layer before, in the order of the backward, would fit, and nothing reads them
before the step ends. So the last of them is marked, and the runtime makes it as soon as the next message is under way
(`runtime/later.py`), at the latest at the end of the entry. What it is made of lives until then.

Taken is the last sum of a product to slots of a function that sends tokens, behind its last message, where the entry
that calls it does not read the sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from mgraph.ir.graph import Function, Module, Node
from mgraph.passes.base import Pass, Report, Stage, Tier
from mgraph.passes.calls import callee
from mgraph.passes.overlap_experts import OverlapExperts

_SUMS = ("accumulate", "accumulate_joined")
_PRODUCT = "aten.mm.default"


@dataclass(frozen=True)
class LateGradients(Pass):
    """Mark gradients that are made while the tokens of the next layer are sent."""

    name: ClassVar[str] = "late-gradients"
    stage: ClassVar[Stage] = Stage.SCHEDULE
    tier: ClassVar[Tier] = Tier.BITWISE
    requires: ClassVar[frozenset[str]] = frozenset({"expert-parallel"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"in-place"})

    def run(self, module: Module, report: Report) -> Module:
        """Mark a sum in each function that has one."""
        functions = dict(module.functions)
        for name, function in module.functions.items():
            node = _last_sum(function)
            if node is None:
                continue
            reason = _read_by(module, function, node)
            if reason:
                report.near_miss(name, node.id, self.name, "read", reason)
                continue
            late = replace(node, attrs={**node.attrs, "late": True}, made_by=self.name)
            functions[name] = replace(function, nodes=tuple(late if n is node else n for n in function.nodes))
            report.match(name, node.id, "made while the next tokens are sent")
        return replace(module, functions=functions)


def _last_sum(function: Function) -> Node | None:
    """The last sum of a product to slots, behind all messages of tokens."""
    makers, found = function.producers(), None
    sends = False
    for node in function.nodes:
        if node.made_by == OverlapExperts.name:
            found, sends = None, True
        elif sends and node.op in _SUMS and set(node.operands[:-1]) <= set(function.slots):
            maker = makers.get(node.operands[-1])
            if maker is not None and maker.op == _PRODUCT:
                found = node
    return found


def _read_by(module: Module, function: Function, node: Node) -> str:
    """What reads the sums before the entry ends; empty where nothing does."""
    if any(value in other.operands for other in function.nodes for value in node.results):
        return f"{function.name} reads it"
    places = [function.results.index(value) for value in node.results]
    entries = {entry.function for entry in module.entries.values()}
    for caller, call in _calls(module, function.name):
        if caller.name not in entries:
            return f"{caller.name}, which is no entry, calls {function.name}"
        made = {call.results[place] for place in places}
        reader = next((other for other in caller.nodes if made & set(other.operands)), None)
        if reader is not None:
            return f"{reader.op} of {caller.name} reads it"
    return ""


def _calls(module: Module, name: str) -> Sequence[tuple[Function, Node]]:
    return [(f, node) for f, node in module.walk() if node.op == "call" and callee(node) == name]
