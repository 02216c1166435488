"""cuda-graphs: what of a step a GPU replays.

    entry microbatch = @microbatch -> (loss_sum, count) updates (…)
    entry microbatch = @microbatch -> (loss_sum, count) updates (…) captured                          as a whole
    entry microbatch = @microbatch -> (loss_sum, count) updates (…) pieces (@layer.fwd.part1, …)      or in pieces

A captured entry is launched as one CUDA graph from its second call with inputs of the same shapes on: the first runs
as any other, and brings up what libraries set up at first use. Captured are the entries that train; what evaluates or
samples sees other shapes each time.

An op that waits for a number from the GPU, or that works on as many rows as the host has read, keeps an entry from
being one graph. Each call of a layer function that has none of them is then a graph, and functions that have some are
split around them (`pieces.py`), and around what is sent between ranks, of which some would be in graphs and some not;
all else of the entry is launched op by op. With `layers` entries are in pieces in any
case, but those that call nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from mgraph.ir.collectives import is_collective
from mgraph.ir.dims import Extent, names_in
from mgraph.ir.graph import Function, Module, Node, Value
from mgraph.ir.types import DType, PendingType
from mgraph.passes.base import Pass, Report, Stage, Tier
from mgraph.passes.calls import callee, calls
from mgraph.passes.pieces import split

CAPTURED = ("microbatch", "finish", "last")
"""Entries that are called again and again with the same shapes."""
_GROUPED: Mapping[str, tuple[int, ...]] = {
    "expert_glu": (0, 3),
    "expert_glu_grad": (0, 4, 5),
    "expert_sum": (0, 1),
    "gathered_outer": (0, 1),
    "grouped_matmul": (0, 1),
    "grouped_matmul_sum": (0, 1, 2, 3),
    "grouped_outer": (0, 1),
    "grouped_sum": (0,),
}
"""Ops with products of groups of rows, and which operands have all widths of these."""
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
_ONE_BY_ONE = "launched op by op"
_LISTS = frozenset({"adamw", "global_norm", "square_sum"})
"""Ops whose kernels find lists of tensors by tables, which are copied to the GPU when the tensors are first seen."""


@dataclass(frozen=True)
class CudaGraphs(Pass):
    """Mark what is launched as CUDA graphs: entries, or layer functions and parts of them."""

    name: ClassVar[str] = "cuda-graphs"
    stage: ClassVar[Stage] = Stage.SCHEDULE
    tier: ClassVar[Tier] = Tier.BITWISE
    requires: ClassVar[frozenset[str]] = frozenset({"in-place"})

    layers: bool = False

    def on_twin(self, real: Module) -> Pass:
        """With the products of groups of `real` for launched one by one, whatever dtypes and widths are."""
        return _OnTwin(self.layers, self._one_by_one(real))

    def _one_by_one(self, module: Module) -> frozenset[str]:
        """The functions with products of groups that are launched one by one."""
        return frozenset(
            name
            for name, function in module.functions.items()
            for node in function.nodes
            if node.op in _GROUPED and not _goes_at_once(node)
        )

    def run(self, module: Module, report: Report) -> Module:
        """Look at everything that an entry runs."""
        plan = _Plan(module, report, self._one_by_one(module))
        entries = dict(module.entries)
        for name in CAPTURED:
            if name not in entries:
                continue
            function = entries[name].function
            found = plan.obstacle(function)
            pieces = plan.pieces(function) if found is not None or self.layers else ()
            if found is not None:
                where, node, why = found
                told = f"no single graph, but calls of {len(pieces)} functions are graphs" if pieces else _ONE_BY_ONE
                report.near_miss(where, node, name, "host", f"{name} is {told}: {why}")
            elif not pieces:
                report.match(function, module.functions[function].nodes[0].id, f"{name} is one CUDA graph")
            entries[name] = replace(entries[name], captured=found is None and not pieces, pieces=pieces)
        if entries == dict(module.entries):
            return module
        return replace(module, entries=entries, functions={**module.functions, **plan.made})


@dataclass(frozen=True)
class _OnTwin(CudaGraphs):
    """As on the model whose twin it runs on, of which these functions multiply groups one by one."""

    one_by_one: frozenset[str] = frozenset()

    def _one_by_one(self, module: Module) -> frozenset[str]:
        return self.one_by_one


class _Plan:
    """Which calls are graphs. `made` has the functions that were split, what is left of them and their parts;
    `one_by_one` names those whose products of groups are launched so."""

    def __init__(self, module: Module, report: Report, one_by_one: frozenset[str]) -> None:
        self._module, self._report, self._one_by_one = module, report, one_by_one
        self.made: dict[str, Function] = {}
        self._known: dict[tuple[str, bool], tuple[str, str, str] | None] = {}
        self._pieces: dict[str, tuple[str, ...]] = {}
        ragged = [dim for dim in module.dims.values() if dim.bound is not None]
        self._read = frozenset(dim.name for dim in ragged if dim.extent is Extent.HOST)
        self._bounds = {dim.name: dim.bound for dim in ragged if dim.bound is not None and dim.name not in self._read}

    def obstacle(self, name: str, *, piece: bool = False) -> tuple[str, str, str] | None:
        """The first node that keeps a function from being one graph, or a `piece`: in which function, its id, why."""
        key = name, piece
        if key not in self._known:
            function = self._module.functions[name]
            found = ((node.id, self._why(function, node, piece)) for node in function.nodes)
            self._known[key] = next(((name, node, why) for node, why in found if why), None)
            if self._known[key] is None:
                called = (self.obstacle(callee(node), piece=piece) for node in calls(function))
                self._known[key] = next((inner for inner in called if inner), None)
        return self._known[key]

    def pieces(self, name: str) -> tuple[str, ...]:
        """The functions of which each call is a graph, of those that a function calls, directly or not."""
        called = dict.fromkeys(callee(node) for node in calls(self._module.functions[name]))
        return tuple(dict.fromkeys(piece for function in called for piece in self._of(function)))

    def _of(self, name: str) -> tuple[str, ...]:
        """The graphs of a call of a function: itself, or its parts and those of what it calls."""
        if name not in self._pieces:
            found = self.obstacle(name) or self.obstacle(name, piece=True)
            function = self._module.functions[name]
            if found is None:
                self._report.match(name, function.nodes[0].id, f"each call of {name} is a CUDA graph")
                self._pieces[name] = (name,)
            else:
                self._pieces[name] = (*self._split(function, found), *self.pieces(name))
        return self._pieces[name]

    def _split(self, function: Function, found: tuple[str, str, str]) -> tuple[str, ...]:
        """The parts of a function that has an obstacle."""

        def allowed(node: Node) -> bool:
            if node.op == "call":
                return self.obstacle(callee(node), piece=True) is None
            return self._why(function, node, True) is None

        parts = split(function, allowed, self._bounds, lambda number: self._name(f"{function.name}.part{number}"))
        where, node, why = found
        alone = len(function.nodes) - parts.taken
        graphs = f"{len(parts.pieces)} graph{'s' * (len(parts.pieces) > 1)}"
        told = f"{graphs}, and {alone} nodes " if parts.pieces else ""
        detail = f"{function.name} is {told}{_ONE_BY_ONE}: {why}"
        self._report.near_miss(where, node, function.name, "host", detail)
        self.made |= {f.name: f for f in (*parts.pieces, parts.function) if parts.pieces}
        for part in parts.pieces:
            detail = f"{len(part.nodes)} nodes of {function.name} are a CUDA graph"
            self._report.match(part.name, part.nodes[0].id, detail)
        return tuple(part.name for part in parts.pieces)

    def _name(self, name: str) -> str:
        while name in self._module.functions:
            name += "_"
        return name

    def _why(self, function: Function, node: Node, piece: bool) -> str | None:
        """Why a node cannot be part of a graph, or of a `piece`."""
        if (why := _obstacle(function, node)) is not None:
            return why
        if node.op in _GROUPED and function.name in self._one_by_one:
            kinds = ", ".join(f"{dtype.text} (multiples of {width})" for dtype, width in _AT_ONCE.items())
            reads = f"{node.op} at {node.origin} reads the sizes of its groups on the host"
            return f"{reads}: all at once go widths of {kinds}"
        values = [v for v in (*node.operands, *node.results) if node.op != "call"]
        if piece and (is_collective(node) or any(isinstance(v.type, PendingType) for v in values)):
            return f"{node.op} at {node.origin} sends between ranks, or copies, beside other work"
        types = [v.type.value if isinstance(v.type, PendingType) else v.tensor for v in values] if self._read else []
        rows = sorted(self._read & {name for type_ in types for dim in type_.shape for name in names_in(dim)})
        return f"{node.op} at {node.origin} has as many rows as the host has read ({rows[0]})" if rows else None


def _obstacle(function: Function, node: Node) -> str | None:
    """Why a node cannot be part of a graph."""
    place = f"{node.op} at {node.origin}"
    if node.op in _WAITING or (node.op in _INDEXING and any(v.tensor.dtype is DType.BOOL for v in node.operands[1:])):
        return f"{place} waits for an extent that is a result"
    if node.op == "read_sizes":
        return f"{place} lets the host read how many rows ranks send (--expert-extent host)"
    if node.op.removesuffix("_") in _LISTS:
        makers = function.producers()
        waits = [m for v in node.operands if (m := makers.get(v)) is not None and m.op == "wait"]
        starts = [makers[v].op for m in waits for v in m.operands if v in makers]
        if any(op.startswith(("reduce_scatter", "to_device")) for op in starts):
            return f"{place} takes new tensors, whose places are known when they are there"
    return None


def _goes_at_once(node: Node) -> bool:
    """Whether one launch takes all groups of rows, whichever provider is chosen."""
    operands = [node.operands[place] for place in _GROUPED[node.op]]
    if node.op == "grouped_sum" and operands[0].tensor.dtype is not DType.BF16:
        return True  # torch adds the rows of segments
    return all(map(_is_wide, operands))


def _is_wide(value: Value) -> bool:
    """Whether there is one product for all groups that takes an operand."""
    extents = [n for n in value.tensor.shape[-2:] if isinstance(n, int)]
    width = _AT_ONCE.get(value.tensor.dtype)
    return width is not None and all(n % width == 0 for n in extents)
