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

from mgraph.ir.graph import Module, Node
from mgraph.ir.types import DType
from mgraph.passes.base import Pass, Report, Stage, Tier

CAPTURED = ("microbatch", "finish", "last")
"""Entries that are called again and again with the same shapes."""
_GROUPED = ("grouped_matmul", "grouped_outer")
_WAITING = frozenset(
    {"aten.nonzero.default", "aten.masked_select.default", "aten._local_scalar_dense.default", "aten.unique.default"}
)


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
            obstacles = ((where, n.id, why) for where, n in _nodes(module, function) if (why := _obstacle(n)))
            if (found := next(obstacles, None)) is not None:
                where, node, why = found
                report.near_miss(where, node, name, "host", f"{name} is launched op by op: {why}")
                continue
            report.match(function, module.functions[function].nodes[0].id, f"{name} is one CUDA graph")
            entries[name] = replace(entries[name], captured=True)
        return replace(module, entries=entries) if entries != dict(module.entries) else module


def _nodes(module: Module, function: str) -> Iterator[tuple[str, Node]]:
    """The nodes of a function and of all that it calls, each function once, with its name."""
    todo, seen = [function], {function}
    while todo:
        name = todo.pop()
        for node in module.functions[name].nodes:
            yield name, node
            if node.op == "call" and (callee := str(node.attrs["callee"])) not in seen:
                seen.add(callee)
                todo.append(callee)


def _obstacle(node: Node) -> str | None:
    """Why a node cannot be part of a graph."""
    place = f"{node.op} at {node.origin}"
    if node.op in _WAITING:
        return f"{place} waits for an extent that is a result"
    if node.op in _GROUPED and node.operands[0].tensor.dtype is not DType.BF16:
        return f"{place} reads the sizes of its groups on the host, as torch has grouped products of bf16 alone"
    return None
