"""cuda-graphs: which entries of a step a GPU replays as a whole.

    entry microbatch = @microbatch -> (loss_sum, count) updates (…)
    entry microbatch = @microbatch -> (loss_sum, count) updates (…) captured          after

A captured entry is launched as one CUDA graph from its second call with inputs of the same shapes on: the first runs
as any other, and brings up what libraries set up at first use. Captured are the entries that train; what evaluates or
samples sees other shapes each time. An op that waits for a number from the GPU keeps an entry from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from mgraph.ir.graph import Function, Module, Node, Value
from mgraph.ir.types import DType
from mgraph.passes.base import Pass, Report, Stage, Tier

CAPTURED = ("microbatch", "finish", "last")
"""Entries that are called again and again with the same shapes."""
_GROUPED = ("grouped_matmul", "grouped_outer")
_AT_ONCE = {DType.BF16: 8, DType.F16: 16, DType.F32: 16}
"""What widths of operands are multiples of where one launch multiplies all groups: torch's of bf16, else a kernel's."""
_WAITING = frozenset(
    {
        "aten._local_scalar_dense.default",
        "aten.bincount.default",
        "aten.masked_select.default",
        "aten.nonzero.default",
        "aten.unique.default",
    }
)
_INDEXING = frozenset({"aten.index.Tensor", "aten.index_put.default"})
_LISTS = frozenset({"adamw", "global_norm", "square_sum"})
"""Ops whose kernels find lists of tensors by tables, which are copied to the GPU when the tensors are first seen."""


@dataclass(frozen=True)
class CudaGraphs(Pass):
    """Mark the entries that are launched as CUDA graphs."""

    name: ClassVar[str] = "cuda-graphs"
    stage: ClassVar[Stage] = Stage.SCHEDULE
    tier: ClassVar[Tier] = Tier.BITWISE
    requires: ClassVar[frozenset[str]] = frozenset({"in-place"})

    def run(self, module: Module, report: Report) -> Module:
        """Look at everything that an entry runs."""
        entries = dict(module.entries)
        for name in CAPTURED:
            if name not in entries:
                continue
            function = entries[name].function
            obstacles = (
                (where.name, n.id, why) for where, n in _nodes(module, function) if (why := _obstacle(where, n))
            )
            if (found := next(obstacles, None)) is not None:
                where, node, why = found
                report.near_miss(where, node, name, "host", f"{name} is launched op by op: {why}")
                continue
            report.match(function, module.functions[function].nodes[0].id, f"{name} is one CUDA graph")
            entries[name] = replace(entries[name], captured=True)
        return replace(module, entries=entries) if entries != dict(module.entries) else module


def _nodes(module: Module, function: str) -> Iterator[tuple[Function, Node]]:
    """The nodes of a function and of all that it calls, each function once, with that function."""
    todo, seen = [function], {function}
    while todo:
        where = module.functions[todo.pop()]
        for node in where.nodes:
            yield where, node
            if node.op == "call" and (callee := str(node.attrs["callee"])) not in seen:
                seen.add(callee)
                todo.append(callee)


def _obstacle(function: Function, node: Node) -> str | None:
    """Why a node cannot be part of a graph."""
    place = f"{node.op} at {node.origin}"
    if node.op in _WAITING or (node.op in _INDEXING and any(v.tensor.dtype is DType.BOOL for v in node.operands[1:])):
        return f"{place} waits for an extent that is a result"
    if node.op == "read_sizes":
        return f"{place} lets the host read how many rows ranks send (--expert-extent host)"
    if node.op in _GROUPED and not all(map(_multiplied_at_once, node.operands[:2])):
        kinds = ", ".join(f"{dtype.text} (multiples of {width})" for dtype, width in _AT_ONCE.items())
        return f"{place} reads the sizes of its groups on the host: all at once go widths of {kinds}"
    if node.op.removesuffix("_") in _LISTS:
        makers = function.producers()
        waits = [m for v in node.operands if (m := makers.get(v)) is not None and m.op == "wait"]
        starts = [makers[v].op for m in waits for v in m.operands if v in makers]
        if any(op.startswith(("reduce_scatter", "to_device")) for op in starts):
            return f"{place} takes new tensors, whose places are known when they are there"
    return None


def _multiplied_at_once(value: Value) -> bool:
    """Whether there is one product for all groups that takes an operand."""
    extents = [n for n in value.tensor.shape[-2:] if isinstance(n, int)]
    width = _AT_ONCE.get(value.tensor.dtype)
    return width is not None and all(n % width == 0 for n in extents)
