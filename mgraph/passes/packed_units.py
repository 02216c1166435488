"""The gradient of a gated unit whose gate and up are parts of one projection, written where that projection's lies.

    %g, %u = slices of %h
    %dg, %du = glu_grad(%dy, %g, %u)
    %a = aten.slice_backward.default(%dg)       ==>    %dh = glu_grad_joined(%dy, %g, %u)
    %b = aten.slice_backward.default(%du)
    %dh = aten.add.Tensor(%a, %b)

A slice's gradient is a tensor of zeros with one part filled in: two of them, and their sum, for what the kernel can
write at once. Gate and up are halves of the projection, in either order, or its columns in turns; units of columns in
turns are marked `spaced`, so that kernels read them where they lie.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mgraph.ir.graph import Function, Node, Value
from mgraph.ir.types import Shard
from mgraph.passes.base import Report
from mgraph.passes.joining import Miss, check

_ADD, _SLICE, _SLICE_BACKWARD = "aten.add.Tensor", "aten.slice.Tensor", "aten.slice_backward.default"


def with_packed_units(function: Function, report: Report, made_by: str) -> Function:
    """The function with such gradients in one result each, and marked units; what only almost is one is a near miss of
    `made_by`."""
    made, users = function.producers(), function.users()
    replaced: dict[Node, Node | None] = {}
    for unit in function.nodes:
        if unit.op != "glu_grad":
            continue
        spread = [user for result in unit.results for user in users.get(result, ())]
        if not spread or any(node.op != _SLICE_BACKWARD for node in spread):
            continue
        try:
            root, layout = _sum_of(function, unit, made, users)
        except Miss as miss:
            report.near_miss(function.name, unit.id, made_by, *miss.args)
            continue
        attrs = {**unit.attrs, **({"layout": layout} if layout != "halves" else {})}
        whole = replace(unit, op="glu_grad_joined", results=root.results, attrs=attrs, made_by=made_by)
        replaced |= dict.fromkeys((unit, *spread))
        replaced[root] = whole
        gone = [unit.id, *(node.id for node in spread), root.id]
        report.match(function.name, root.id, f"both gradients of a packed unit at once ({layout})", gone, [whole.id])
    turns = {n.operands[1:] for n in replaced.values() if n is not None and n.attrs.get("layout") == "interleaved"}
    for unit in function.nodes:
        if unit.op == "glu" and not unit.attrs.get("spaced") and (unit.operands in turns or _in_turns(unit, made)):
            replaced[unit] = replace(unit, attrs={**unit.attrs, "spaced": True}, made_by=made_by)
            report.match(function.name, unit.id, "gate and up are read where they lie, in turns", [unit.id], [unit.id])
    if not replaced:
        return function
    nodes = (replaced.get(node, node) for node in function.nodes)
    return replace(function, nodes=tuple(node for node in nodes if node is not None))


def _in_turns(unit: Node, made: Mapping[Value, Node]) -> bool:
    """Whether gate and up are every second column of one tensor."""
    slices = [made.get(operand) for operand in unit.operands]
    last = len(unit.result.tensor.shape) - 1
    return all(
        node is not None
        and node.op == _SLICE
        and (node.attrs.get("dim", 0), node.attrs.get("step", 1)) == (last, 2)
        and slices[0] is not None
        and node.operands == slices[0].operands
        for node in slices
    )


def _sum_of(
    function: Function, unit: Node, made: Mapping[Value, Node], users: Mapping[Value, list[Node]]
) -> tuple[Node, str]:
    """The sum of what both gradients are spread to, and how gate and up lie in it. Raises `Miss`."""
    spread: list[Node] = []
    for result in unit.results:
        readers = users.get(result, [])
        check(len(readers) == 1 and result not in function.results, "users", f"{result!r} is read elsewhere, too")
        spread += readers
    gate, up = spread
    sums = [user for node in spread for user in users.get(node.result, ())]
    one = len(sums) == 2 and sums[0] is sums[1] and not {gate.result, up.result} & set(function.results)
    check(one and sums[0].op == _ADD and not sums[0].attrs, "sum", "its gradients are not added to each other alone")
    root = sums[0]
    size, shape = unit.results[0].tensor.shape[-1], root.result.tensor.shape
    check(isinstance(size, int) and shape[-1] == 2 * size, "shape", f"gradients of {size} columns make {shape[-1]}")
    last = len(shape) - 1
    split = any(isinstance(placed, Shard) and placed.dim == last for _, placed in unit.results[0].tensor.placement)
    check(not split, "placement", "the columns of gate and up are split over ranks")
    spans = tuple(_span(node, last, 2 * int(size)) for node in spread)
    halves = ((0, size, 1), (size, 2 * size, 1))
    layouts: dict[tuple[tuple[Any, ...], ...], str] = {
        halves: "halves",
        halves[::-1]: "swapped",
        ((0, 2 * size, 2), (1, 2 * size, 2)): "interleaved",
    }
    check(spans in layouts, "layout", f"gate and up are the columns {' and '.join(map(str, spans))} of the projection")
    return root, layouts[spans]


def _span(node: Node, last: int, width: int) -> tuple[Any, ...]:
    """Begin, end and step of the columns that a slice's gradient fills."""
    attrs = node.attrs
    if attrs["dim"] not in (last, -1):
        return ("of dim", attrs["dim"])
    end = attrs["end"]
    return attrs["start"], min(end, width) if isinstance(end, int) else end, attrs["step"]
