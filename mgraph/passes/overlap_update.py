"""overlap-update: parameters are updated while gradients of others are still summed over ranks.

    %pa, %pb, %pn = all_reduce_start(@a.grad, @b.grad, @acc.count)      %pn = all_reduce_start(@acc.count)
    %a, %b, %n = wait(%pa, %pb, %pn)                                    %pa = all_reduce_start(@a.grad)
    %scale = …(%n)                                                      %pb = all_reduce_start(@b.grad)
    %own, %new_a, %new_b, … = adamw(…, @own.grad, %a, %b, …, %scale)    %n = wait(%pn)
                                                                  ==>   %scale = …(%n)
                                                                        %own, … = adamw(…, @own.grad, %scale)
                                                                        %a = wait(%pa)
                                                                        %new_a, … = adamw(…, %a, %scale)
                                                                        %b = wait(%pb)
                                                                        %new_b, … = adamw(…, %b, %scale)

What updates need beside gradients is summed first, in a message of its own; gradients follow in messages of some size.
Parameters whose gradients are not summed, as experts' with `ep`, go first. An update that needs the norm of all
gradients, to clip or to see whether they are finite, waits for all of them: then the function stays as it is.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from mgraph.ir.dims import evaluate
from mgraph.ir.graph import Function, Module, Node, Value
from mgraph.ir.opdef import op_def
from mgraph.ir.ops.cost import value_bytes
from mgraph.passes.adamw import SCALARS, gradients_of
from mgraph.passes.base import Pass, Report, Stage, Tier

UPDATE = "adamw"
MOST = 8
SUMMED = ("all_reduce_start", "reduce_scatter_start")


@dataclass(frozen=True)
class OverlapUpdate(Pass):
    """Update parameters while gradients of others are summed, in messages of `bucket` bytes, of more where a sum would
    have more than eight."""

    bucket: int = 2**27

    name: ClassVar[str] = "overlap-update"
    stage: ClassVar[Stage] = Stage.SCHEDULE
    tier: ClassVar[Tier] = Tier.BITWISE
    requires: ClassVar[frozenset[str]] = frozenset({"finish"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"in-place"})

    def run(self, module: Module, report: Report) -> Module:
        """Rewrite every function that sums gradients and updates; a module without is returned as it is."""
        alone = {axis.name for axis in module.mesh if axis.size == 1}
        for function in module.functions.values():
            updates = [node for node in function.nodes if node.op == UPDATE and not node.attrs.get("sums")]
            ends = [end for end in _ends(function, alone) if not _gradients(updates).isdisjoint(end.results)]
            if ends and (plan := _Plan(function, updates, ends, self.bucket)).is_possible(report):
                module = module.with_function(replace(function, nodes=tuple(plan.nodes(self.name))))
                counted = f"{len(plan.messages)} message" + "s" * (len(plan.messages) > 1)
                summed = sum(map(len, plan.messages))
                detail = f"{summed} gradients in {counted}, {len(plan.own)} that are not summed"
                report.match(function.name, ends[0].id, detail)
        return module


def _ends(function: Function, alone: Container[str]) -> Iterator[Node]:
    """The ends of sums over ranks, but for axes of one rank."""
    starts = {n.results for n in function.nodes if n.op in SUMMED and n.attrs["axis"] not in alone}
    return (node for node in function.nodes if node.op == "wait" and node.operands in starts)


def _gradients(updates: Iterable[Node]) -> set[Value]:
    return {gradient for update in updates for gradient in gradients_of(update)}


class _Plan:
    """What is summed together, and the order of a function's nodes."""

    def __init__(self, function: Function, updates: Sequence[Node], ends: Sequence[Node], bucket: int) -> None:
        self._function, self._updates, self._ends = function, updates, ends
        gradients = _gradients(updates)
        summed = [[v for v in end.results if v in gradients] for end in ends]
        self._sent = {v for values in summed for v in values}
        self.own = gradients - self._sent
        """The gradients that no sum gives."""
        self.messages = [message for values in summed for message in _messages(values, bucket)]
        """The gradients of each message, in the order in which they are sent."""
        self._late = _reached(function, self._sent | {v for update in updates for v in update.results})

    def is_possible(self, report: Report) -> bool:
        """Whether there is anything that need not wait for all sums, and no order that must stay."""
        if any(node.op == "to_device_start" for node in self._function.nodes):
            detail = "state comes from the host part by part, each as the one before is updated"
            report.near_miss(self._function.name, self._updates[0].id, UPDATE, "offloaded", detail)
            return False
        for update in self._updates:
            needed = [v for v in update.operands if v in self._late and v not in self._sent]
            if needed:
                detail = f"it needs {needed[0]!r}, which is made of all gradients"
                report.near_miss(self._function.name, update.id, UPDATE, "waits", detail)
                return False
        return len(self.messages) + bool(self.own) > 1

    def nodes(self, made_by: str) -> Iterator[Node]:
        """The nodes in their new order: updates, and all that hangs on them or on gradients, come last."""
        starts = {end.operands: end for end in self._ends}
        rest = []
        for node in self._function.nodes:
            if node.results in starts:
                yield from self._started(node, starts[node.results], made_by)
            elif node in self._ends:
                yield from _part(node, [i for i, v in enumerate(node.results) if v not in self._sent], made_by)
            elif node.op == "zero" or not self._late.isdisjoint((*node.operands, *node.results)):
                rest.append(node)
            else:
                yield node
        yield from self._updated(self.own, made_by)
        for message in self.messages:
            for end in self._ends:
                yield from _part(end, [i for i, v in enumerate(end.results) if v in message], made_by)
            yield from self._updated(message, made_by)
        yield from (node for node in rest if node not in self._updates)

    def _started(self, start: Node, end: Node, made_by: str) -> Iterator[Node]:
        """The messages of a sum, that of what updates need besides first."""
        yield from _part(start, [i for i, v in enumerate(end.results) if v not in self._sent], made_by)
        for message in self.messages:
            yield from _part(start, [i for i, v in enumerate(end.results) if v in message], made_by)

    def _updated(self, gradients: Iterable[Value], made_by: str) -> Iterator[Node]:
        """The updates of the parameters with these gradients."""
        for update in self._updates:
            places = [place for place, gradient in enumerate(gradients_of(update)) if gradient in set(gradients)]
            attrs = op_def(UPDATE).complete(update.attrs)
            count, scalars = attrs["n"], update.operands[-SCALARS:]
            if not places:
                continue
            operands = [update.operands[base + p] for base in _bases(update.operands[:-SCALARS], count) for p in places]
            results = [update.results[base + p] for base in _bases(update.results, count) for p in places]
            each = {k: tuple(attrs[k][p] for p in places) for k in ("weight_decays", "rates") if attrs[k]}
            yield replace(
                update,
                operands=(*operands, *scalars),
                results=tuple(results),
                attrs={**update.attrs, **each, "n": len(places)},
                made_by=made_by,
            )


def _bases(values: Sequence[Value], count: int) -> range:
    """Where the lists begin that an update has one after another."""
    return range(0, len(values), count)


def _part(node: Node, places: Sequence[int], made_by: str) -> Iterator[Node]:
    """The start or the end of a sum of some of its tensors, if these are any; itself, if these are all."""
    if len(places) == len(node.results):
        yield node
    elif places:
        operands, results = (tuple(values[p] for p in places) for values in (node.operands, node.results))
        yield replace(node, operands=operands, results=results, made_by=made_by)


def _messages(values: Sequence[Value], bucket: int) -> Iterator[list[Value]]:
    """The values in runs of about as many bytes, or more where there would be too many."""
    sizes = [int(evaluate(value_bytes(value), {})) for value in values]
    bucket = max(bucket, -(-sum(sizes) // MOST))
    message: list[Value] = []
    size = 0
    for value, more in zip(values, sizes, strict=True):
        message.append(value)
        size += more
        if size >= bucket:
            yield message
            message, size = [], 0
    if message:
        yield message


def _reached(function: Function, values: set[Value]) -> set[Value]:
    """These values and all that is made of them."""
    found = set(values)
    for node in function.nodes:
        if not found.isdisjoint(node.operands):
            found.update(node.results)
    return found
