"""write-gradients: with one microbatch a step, gradients are written where they would be added to zeros.

    %grad_w = accumulate(@w.grad, %dw)                       in microbatch
    %zero_w = zero(@w.grad)              updates (w.grad)    in finish

becomes

    %grad_w = accumulate(@w.grad, %dw) {fresh = true}

and the reset at the end of a step is left out, as nothing reads what it would have cleared: two passes over all
gradients less. An accumulator is written if its first and only sum in a step is that of a plain tensor or product;
rows that are added where tokens name them keep their zeros. Those of one `accumulate_each`, which adds up what came
from other ranks, are written all or none.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import ClassVar

from mgraph.errors import PassError
from mgraph.ir.graph import Function, Module, Node, StateKind, Value
from mgraph.passes.base import Pass, Report, Stage, Tier
from mgraph.passes.calls import callee

MICROBATCH, FINISH = "microbatch", "finish"
_SCATTERED = ("aten.embedding_dense_backward.default", "embedding_part_grad")
"""Gradients that kernels add to a total part by part."""

Sum = tuple[str, Node]
"""An `accumulate` or `accumulate_each`, and the function that it stands in."""


@dataclass(frozen=True)
class WriteGradients(Pass):
    """Write the gradients of a step's only microbatch in place of adding them."""

    name: ClassVar[str] = "write-gradients"
    stage: ClassVar[Stage] = Stage.SCHEDULE
    tier: ClassVar[Tier] = Tier.REASSOCIATING
    requires: ClassVar[frozenset[str]] = frozenset({"microbatch", "finish"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"in-place"})
    whole_steps: ClassVar[bool] = True

    def run(self, module: Module, report: Report) -> Module:
        """Mark the sums, and leave out the resets; a module without a match is returned as it is."""
        if set(module.entries) & {"last", "step"}:
            raise PassError("gradients are summed by another entry, too", hint="leave out --overlap")
        found = _Sums(module, report)
        if not found.of_state:
            return module
        marked = {node for _, node in found.of_state.values()}
        functions = dict(module.functions)
        for where in {where for where, _ in found.of_state.values()}:
            nodes = (self._fresh(n) if n in marked else n for n in functions[where].nodes)
            functions[where] = replace(functions[where], nodes=tuple(nodes))
        report.count("gradients", len(found.of_state))
        return _without_resets(replace(module, functions=functions), set(found.of_state))

    def _fresh(self, node: Node) -> Node:
        return replace(node, attrs={**node.attrs, "fresh": True}, made_by=self.name)


class _Sums:
    """The sum of each gradient accumulator that can be written: `of_state`, by the name of the state."""

    def __init__(self, module: Module, report: Report) -> None:
        self._module = module
        entry = module.entry_function(MICROBATCH)
        grads = {s.value: s.name for s in module.state.values() if s.kind is StateKind.GRAD}
        self.of_state: dict[str, Sum] = {}
        for value, name in grads.items():
            made = self._only_sum(entry, value)
            if isinstance(made, str):
                report.near_miss(entry.name, name, WriteGradients.name, "sum", made)
            else:
                self.of_state[name] = made
        written = Counter(node for _, node in self.of_state.values())
        for name, (_, node) in list(self.of_state.items()):
            if node.op == "accumulate_each" and written[node] != len(node.results):
                del self.of_state[name]
                report.near_miss(entry.name, name, WriteGradients.name, "sum", f"{node.id} adds to others")

    def _only_sum(self, function: Function, total: Value) -> Sum | str:
        """The one sum to a total that a function has, itself or in what it calls; or why there is none to write."""
        readers = [node for node in function.nodes if total in node.operands]
        if len(readers) != 1 or readers[0].operands.count(total) != 1 or total in function.results:
            return f"it is read {len(readers)} times in {function.name}"
        (node,) = readers
        if node.op == "call":
            inner = self._module.functions[callee(node)]
            slot = node.operands.index(total) - len(inner.params)
            if slot < 0 or self._is_called_otherwise(inner.name, node.operands.index(total)):
                return f"{inner.name} is handed other tensors, too"
            return self._only_sum(inner, inner.slots[slot])
        place, parts = node.operands.index(total), len(node.operands) // 2
        if node.op not in ("accumulate", "accumulate_each") or place >= parts:
            return f"{node.op} reads it"
        if sum(n.operands.count(node.results[place]) for n in function.nodes):
            return f"its sum is read again in {function.name}"
        maker = function.producers().get(node.operands[parts + place])
        if maker is not None and maker.op in _SCATTERED:
            return f"{maker.op} adds to parts of it"
        return function.name, node

    def _is_called_otherwise(self, name: str, place: int) -> bool:
        """Whether a function is called with something else than a gradient accumulator that only this call reads."""
        grads = {s.value for s in self._module.state.values() if s.kind is StateKind.GRAD}
        given = [(f, n.operands[place]) for f, n in self._module.walk() if n.op == "call" and callee(n) == name]
        return any(v not in grads or sum(n.operands.count(v) for n in f.nodes) != 1 for f, v in given)


def _without_resets(module: Module, written: set[str]) -> Module:
    """The module whose `finish` resets the other accumulators only."""
    entry, function = module.entries[FINISH], module.entry_function(FINISH)
    kept = [name not in written for name in entry.updates]
    outputs = len(entry.outputs)
    updated = [v for v, keep in zip(function.results[outputs:], kept, strict=True) if keep]
    results = (*function.results[:outputs], *updated)
    nodes = []
    for node in function.nodes:
        if node.op == "zero":
            pairs = [(o, r) for o, r in zip(node.operands, node.results, strict=True) if o.name not in written]
            node = node.with_values(tuple(o for o, _ in pairs), tuple(r for _, r in pairs))
        nodes.append(node)
    updates = tuple(name for name, keep in zip(entry.updates, kept, strict=True) if keep)
    entries = {**module.entries, FINISH: replace(entry, updates=updates)}
    return replace(module, entries=entries).with_function(replace(function, nodes=tuple(nodes), results=results))
