"""fuse-loss: the loss and its gradient in one op, which reads the logits once from memory.

Before:

    %sum, %lse = cross_entropy(%logits, %labels)
    %dsum = …
    %dlogits = cross_entropy_grad(%dsum, %logits, %labels, %lse)

After:

    %dsum = …
    %sum, %lse, %dlogits = cross_entropy_with_grad(%logits, %labels, %dsum)

for a gradient in the function of its loss, where the cotangent is known before the loss, as it is in training, and
the logits' memory may be taken for their gradient: the function made them, and nothing reads them afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from mgraph.ir.graph import Function, Module, Node, Value
from mgraph.ir.opdef import op_def
from mgraph.passes.base import Pass, Report, Stage, Tier

FUSED = "cross_entropy_with_grad"


@dataclass(frozen=True)
class FuseLoss(Pass):
    """Join each loss with its gradient."""

    name: ClassVar[str] = "fuse-loss"
    stage: ClassVar[Stage] = Stage.FUSE
    tier: ClassVar[Tier] = Tier.BITWISE
    conflicts: ClassVar[frozenset[str]] = frozenset({"in-place"})

    def run(self, module: Module, report: Report) -> Module:
        """Rewrite every function; a module without a match is returned as it is."""
        functions = {name: _fused(function, self.name, report) for name, function in module.functions.items()}
        changed = any(functions[name] is not f for name, f in module.functions.items())
        return replace(module, functions=functions) if changed else module


def _fused(function: Function, made_by: str, report: Report) -> Function:
    for node in function.nodes:
        if node.op == "cross_entropy_part_grad":
            why = "the vocabulary is split over ranks, which join their parts between the loss and the gradient"
            report.near_miss(function.name, node.id, FUSED, "vocabulary", why)
    for gradient in [node for node in function.nodes if node.op == "cross_entropy_grad"]:
        pair = _Pair(function, gradient)
        if pair.miss is not None:
            report.near_miss(function.name, gradient.id, FUSED, *pair.miss)
            continue
        assert pair.loss is not None
        function = pair.joined(pair.loss, made_by)
        report.match(function.name, pair.loss.id, FUSED, (pair.loss.id, gradient.id), (pair.loss.id,))
    return function


class _Pair:
    """A gradient and the loss that it belongs to; `miss` is the first guard that keeps them apart, and why."""

    def __init__(self, function: Function, gradient: Node) -> None:
        self._function = function
        self._producers: Mapping[Value, Node] = function.producers()
        self._gradient = gradient
        maker = self._producers.get(gradient.operands[3])
        self.loss = maker if maker is not None and maker.op == "cross_entropy" else None
        self._needed = self._makers(gradient.operands[0])
        self.miss = self._first_miss()

    def _makers(self, value: Value) -> set[Node]:
        """All nodes that a value is made of."""
        found, todo = set[Node](), [value]
        while todo:
            maker = self._producers.get(todo.pop())
            if maker is not None and maker not in found:
                found.add(maker)
                todo.extend(maker.operands)
        return found

    def _first_miss(self) -> tuple[str, str] | None:
        dsum, logits, labels, lse = self._gradient.operands
        loss = self.loss
        if loss is None:
            return "loss", f"{lse!r} is not made by a cross_entropy in this function"
        if loss.operands != (logits, labels):
            return "operands", f"the loss is of {loss.operands!r}, the gradient of {(logits, labels)!r}"
        attrs = [op_def(node.op).complete(node.attrs) for node in (loss, self._gradient)]
        if attrs[0] != attrs[1]:
            return "attributes", f"the loss has {attrs[0]}, the gradient {attrs[1]}"
        if loss in self._needed:
            return "cotangent", f"{dsum!r} depends on the loss"
        return self._logits_miss(logits, loss)

    def _logits_miss(self, logits: Value, loss: Node) -> tuple[str, str] | None:
        """Why the memory of the logits, or of what they are a reshape of, may not be taken."""
        nodes = self._function.nodes
        begin, value, view = nodes.index(loss), logits, None
        while True:
            if value.is_state or value in self._function.inputs():
                return "logits", f"{value!r} is not made in this function"
            if value in self._function.results:
                return "logits", f"{value!r} is a result of the function"
            late = [node for node in nodes[begin:] if value in node.operands and node not in (loss, self._gradient)]
            if late:
                return "logits", f"{value!r} is read again by `{late[0].op}`"
            view = self._producers[value]
            if view.op != "reshape":
                return None
            value = view.operands[0]

    def joined(self, loss: Node, made_by: str) -> Function:
        """The function with both in one node, in the loss's place; what makes the cotangent goes before it."""
        dsum, logits, labels, _ = self._gradient.operands
        results = (*loss.results, *self._gradient.results)
        both = replace(loss, op=FUSED, operands=(logits, labels, dsum), results=results, made_by=made_by)
        begin = self._function.nodes.index(loss)
        rest = [node for node in self._function.nodes[begin + 1 :] if node is not self._gradient]
        moved = [node for node in rest if node in self._needed]
        kept = [node for node in rest if node not in self._needed]
        return replace(self._function, nodes=(*self._function.nodes[:begin], *moved, both, *kept))
