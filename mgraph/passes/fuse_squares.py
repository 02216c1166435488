"""fuse-squares: the update of parameters gives the sums of squares of the gradients, which it reads anyway.

    %norm = global_norm(@w.grad, …)                      %w, …, %m, …, %v, …, %squares = adamw(…, @w.grad, …)
    %grad_norm = aten.div.Tensor(%norm, %tokens)   ==>       {n = …, sums = [0, …]}
    %w, …, %m, …, %v, … = adamw(…, @w.grad, …)           %norm = aten.sqrt.default(%squares)
                                                         %grad_norm = aten.div.Tensor(%norm, %tokens)

Likewise `square_sum`: on a mesh those of parts, and of whole tensors, are sums of their own, and what is summed over
ranks is summed as before, but after the update. Sums over the gradients of several updates are added up. It saves a
pass over all gradients wherever the updates can do without the sum: where it clips nothing (`max_norm=0`), and does not
tell whether the step is one (`check=loss`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from mgraph.ir.builder import FunctionBuilder, rebuild
from mgraph.ir.graph import Function, Module, Node, Value
from mgraph.passes.adamw import gradients_of
from mgraph.passes.base import Pass, Report, Stage, Tier

UPDATE = "adamw"
SUMS = ("global_norm", "square_sum")


@dataclass(frozen=True)
class FuseSquares(Pass):
    """Let updates of parameters give the norm of the gradients."""

    name: ClassVar[str] = "fuse-squares"
    stage: ClassVar[Stage] = Stage.SCHEDULE
    tier: ClassVar[Tier] = Tier.REASSOCIATING
    requires: ClassVar[frozenset[str]] = frozenset({"finish"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"in-place"})

    def run(self, module: Module, report: Report) -> Module:
        """Rewrite every function that updates; a module without a match is returned as it is."""
        for function in module.functions.values():
            updates = [n for n in function.nodes if n.op == UPDATE]
            if updates and (sums := _had_late(function, updates, report)):
                module = module.with_function(_Fused(function, updates, sums, self.name).rewritten())
        return module


def _had_late(function: Function, updates: Sequence[Node], report: Report) -> list[Node]:
    """The sums that updates can give: of gradients that they read, each in one sum, and that none of them needs."""
    left = Counter(value for update in updates if not update.attrs.get("sums") for value in gradients_of(update))
    found = []
    for node in function.nodes:
        if node.op not in SUMS:
            continue
        others = [v for v, times in Counter(node.operands).items() if (times, left[v]) != (1, 1)]
        if others:
            guard, detail = "gradients", f"{others[0]!r} is no gradient that one update reads, or counts in another sum"
        elif any(n.op == UPDATE for n in _readers(function, node)):
            guard, detail = "waits", "the update needs it, to clip or to see whether the gradients are finite"
        else:
            found.append(node)
            left -= Counter(node.operands)
            names = [u.id for u in updates if {*node.operands} & {*gradients_of(u)}]
            report.match(function.name, node.id, f"given by {', '.join(names)}", [node.id], names)
            continue
        report.near_miss(function.name, node.id, node.op, guard, detail)
    return found


def _readers(function: Function, node: Node) -> list[Node]:
    """The nodes that a node's results reach."""
    reached, readers = {*node.results}, []
    for other in function.nodes:
        if not reached.isdisjoint(other.operands):
            reached.update(other.results)
            readers.append(other)
    return readers


class _Fused:
    """A function whose updates give sums; what hangs on them comes after the last of these updates."""

    def __init__(self, function: Function, updates: Sequence[Node], sums: Sequence[Node], made_by: str) -> None:
        self._function, self._sums, self._made_by = function, sums, made_by
        self._parts: dict[Node, list[Value]] = {node: [] for node in sums}
        self._left = [u for u in updates if self._given(u)]

    def _given(self, update: Node) -> list[Node]:
        """The sums that an update adds to."""
        gradients = {*gradients_of(update)}
        return [node for node in self._sums if not gradients.isdisjoint(node.operands)]

    def rewritten(self) -> Function:
        """The function with its nodes in the new order."""
        builder = rebuild(self._function, self._made_by)
        late = {node.result for node in self._sums}
        waiting: list[Node] = []
        for node in self._function.nodes:
            if node in self._sums:
                continue
            if self._left and not late.isdisjoint(node.operands):
                late.update(node.results)
                waiting.append(node)
            elif node in self._left:
                builder.nodes.append(self._with_sums(builder, node))
                self._left.remove(node)
                if not self._left:
                    for total in self._sums:
                        with builder.at(total):
                            self._join(builder, total)
                    builder.nodes += waiting
            else:
                builder.nodes.append(node)
        return builder.build(self._function.results)

    def _with_sums(self, builder: FunctionBuilder, update: Node) -> Node:
        given = self._given(update)
        numbers = {gradient: number for number, total in enumerate(given) for gradient in total.operands}
        for total in given:
            alone = total.op == "square_sum" and {*total.operands} <= {*gradients_of(update)}
            made = total.result if alone else Value(builder.fresh("squares"), total.result.type)
            self._parts[total].append(made)
        results = (*update.results, *(self._parts[total][-1] for total in given))
        attrs = {**update.attrs, "sums": tuple(numbers.get(gradient, -1) for gradient in gradients_of(update))}
        return replace(update, results=results, attrs=attrs, made_by=self._made_by)

    def _join(self, builder: FunctionBuilder, total: Node) -> None:
        """The sum of what several updates give, or the root of that, as the old value."""
        value, *others = self._parts[total]
        for place, other in enumerate(others, start=1):
            last = total.op == "square_sum" and place == len(others)
            value = self._made(builder, "aten.add.Tensor", (value, other), total.result if last else None)
        if total.op == "global_norm":
            self._made(builder, "aten.sqrt.default", (value,), total.result)

    def _made(self, builder: FunctionBuilder, op: str, operands: tuple[Value, ...], result: Value | None) -> Value:
        """A node of one scalar, under a fresh name or as a value that there was."""
        result = result or Value(builder.fresh("squares"), operands[0].type)
        builder.nodes.append(Node(op, operands, (result,), {}, builder.phase, builder.origin, self._made_by))
        return result
