"""Which collectives a module issues, in which order: read off its functions once each, whatever the depth or the mesh.

Every rank runs the same entry function, and a `call` runs its callee's nodes in its place. So the sequence of an entry
is the word that its function spells, where a call stands for the word of its callee. It is never written out: each
function keeps its own collectives and the names of the callees that issue any, and lengths and places add up from
there. A word of a thousand layers costs one addition per call.

How many elements a rank hands over follows from the types. An extent lies over an axis in one of two ways: a dim that
the inputs of an entry are sharded along is bound on each rank to its own part (`B` over a data axis), and is written as
it is; any other sharded extent is divided by the size of the axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import sympy

from mgraph.ir.dims import Dim, Extent, as_dim, dim_text, names_in, product, substitute
from mgraph.ir.facts import multiples, share
from mgraph.ir.graph import Function, Module, Node, Value
from mgraph.ir.local import bound_dims
from mgraph.ir.ops.cost import flops_of
from mgraph.ir.printer import callee_of
from mgraph.ir.types import PendingType, Shard, TensorType, Type
from mgraph.step_order import KINDS

SPLIT = "_start"
"""The ending of the ops that begin a collective; `wait` ends it."""


@dataclass(frozen=True, slots=True, eq=False)
class Issued:
    """One node that is a collective, in its function."""

    function: Function
    node: Node

    @property
    def kind(self) -> str:
        """`all_reduce`, `all_gather`, `reduce_scatter` or `all_to_all`, split or not."""
        return kind_of(self.node.op)

    @property
    def axis(self) -> str:
        """The mesh axis, or product of axes, whose groups take part."""
        return str(self.node.attrs["axis"])


@dataclass(frozen=True, slots=True)
class Run:
    """One collective in the sequence of an entry: how often it is issued, and its first and last place, from 1."""

    issued: Issued
    first: int
    last: int
    times: int


def is_collective(node: Node) -> bool:
    """Whether ranks talk to each other when a node runs (in `wait` they do not)."""
    return kind_of(node.op) in KINDS


def sent(node: Node) -> tuple[Value, ...]:
    """The tensors that a collective hands over: its operands, but for the sizes of messages."""
    return node.operands[: -1 if node.attrs.get("rows") is not None else None]


def kind_of(op: str) -> str:
    """The collective of an op, without whether it is split or in place: `all_reduce` of `all_reduce_start`."""
    return op.removesuffix("_").removesuffix(SPLIT)


@dataclass(frozen=True)
class CollectiveOrder:
    """The order of collectives of a module."""

    module: Module

    @cached_property
    def items(self) -> dict[str, tuple[Issued | str, ...]]:
        """By function: its collectives and, in their places, the callees that issue any. Functions without are absent.

        The functions are in an order in which callees come first.
        """
        found: dict[str, tuple[Issued | str, ...]] = {}
        seen: set[str] = set()

        def visit(name: str) -> None:
            seen.add(name)
            function = self.module.functions[name]
            items: list[Issued | str] = []
            for node in function.nodes:
                callee = callee_of(node)
                if callee is not None:
                    if callee not in seen:
                        visit(callee)
                    items += [callee] if callee in found else []
                elif is_collective(node):
                    items.append(Issued(function, node))
            if items:
                found[name] = tuple(items)

        for name in self.module.functions:
            if name not in seen:
                visit(name)
        return found

    @cached_property
    def issued(self) -> tuple[Issued, ...]:
        """Every node that is a collective, once."""
        return tuple(item for items in self.items.values() for item in items if isinstance(item, Issued))

    @cached_property
    def _runs(self) -> dict[str, tuple[dict[Issued, Run], int]]:
        """By function: its runs, and the length of its sequence."""
        made: dict[str, tuple[dict[Issued, Run], int]] = {}
        for name, items in self.items.items():
            runs: dict[Issued, Run] = {}
            length = 0
            for item in items:
                inner, count = ({item: Run(item, 1, 1, 1)}, 1) if isinstance(item, Issued) else made[item]
                for issued, run in inner.items():
                    before = runs.get(issued)
                    first = before.first if before is not None else length + run.first
                    times = run.times + (before.times if before is not None else 0)
                    runs[issued] = Run(issued, first, length + run.last, times)
                length += count
            made[name] = runs, length
        return made

    def runs(self, entry: str) -> list[Run]:
        """The collectives of an entry by their first place."""
        runs, _ = self._runs.get(self.module.entries[entry].function, ({}, 0))
        return sorted(runs.values(), key=lambda run: run.first)

    def length(self, entry: str) -> int:
        """How many collectives an entry issues."""
        return self._runs.get(self.module.entries[entry].function, ({}, 0))[1]

    def flops(self, node: Node) -> Dim:
        """Operations of a node, on whole tensors; those of a call are those of what it runs."""
        callee = callee_of(node)
        if callee is None:
            return flops_of(node)
        if callee not in self._flops:
            self._flops[callee] = as_dim(sum(self.flops(inner) for inner in self.module.functions[callee].nodes))
        return self._flops[callee]

    @cached_property
    def _flops(self) -> dict[str, Dim]:
        return {}

    @cached_property
    def shares(self) -> Shares:
        """How extents lie over the mesh."""
        return Shares(self.module)


@dataclass(frozen=True, slots=True)
class Overlap:
    """What runs between the start of a collective and its wait: nodes, and their operations."""

    nodes: int
    flops: Dim


def overlap(order: CollectiveOrder, issued: Issued) -> Overlap:
    """The window of a collective that is split in two, as its first call has it: through all functions that hand on
    what is under way. Other collectives and waits do not count."""
    module, function, value = order.module, issued.function, issued.node.results[0]
    after = function.nodes.index(issued.node) + 1
    between: list[Node] = []
    while True:
        end = next((i for i, node in enumerate(function.nodes) if value in node.operands), None)
        between += function.nodes[after:end]
        if end is None:
            caller, place = next(
                (f, i)
                for f in module.functions.values()
                for i, n in enumerate(f.nodes)
                if callee_of(n) == function.name
            )
            value = caller.nodes[place].results[function.results.index(value)]
            function, after = caller, place + 1
        elif function.nodes[end].op == "wait":
            break
        else:
            reader = function.nodes[end]
            function, after = module.functions[str(callee_of(reader))], 0
            value = function.inputs()[reader.operands.index(value)]
    between = [node for node in between if node.op != "wait" and not is_collective(node)]
    return Overlap(len(between), as_dim(sum(map(order.flops, between))))


def message_bytes(order: CollectiveOrder, issued: Issued) -> Dim:
    """Bytes of one message, on its larger side: of what a gather gives, or of what any other collective takes; at most
    those, where the host reads the sizes of messages."""
    values = issued.node.results if issued.kind == "all_gather" else sent(issued.node)
    return as_dim(sum(order.shares.bytes(value.type) for value in values))


class Shares:
    """The part of a tensor that one rank holds, by the placement of its type."""

    def __init__(self, module: Module) -> None:
        self._parts = {axis.name: axis.of or (axis.name,) for axis in module.mesh}
        self._sizes = {axis.name: axis.size for axis in module.mesh}
        self._dims = module.dims
        self._bound = bound_dims(module)
        self._multiples = multiples((fact.text for fact in module.facts), self._sizes)

    def parts(self, axis: str) -> tuple[str, ...]:
        """The single axes that an axis is made of, itself if it is single."""
        return self._parts[axis]

    def size(self, axis: str) -> int | None:
        """The number of ranks of a group; None where it is known at launch only."""
        size = 1
        for part in self.parts(axis):
            known = self._sizes[part]
            if known is None:
                return None
            size *= known
        return size

    def elements(self, type_: Type) -> Dim:
        """How many elements each rank holds of a tensor, of a ragged one at most. Raises ValueError where ranks of a
        group may hold unequal numbers, since an extent does not divide."""
        tensor = type_.value if isinstance(type_, PendingType) else type_
        shape = list(tensor.physical.shape if tensor.physical is not None else tensor.shape)
        for axis, placement in tensor.placement:
            if not isinstance(placement, Shard):
                continue
            for part in self.parts(axis):
                if not any((name, part) in self._bound for name in names_in(tensor.shape[placement.dim])):
                    shape[placement.dim] = self._divided(tensor, placement.dim, shape[placement.dim], part)
        return product(self._bounded(dim) for dim in shape)

    def bytes(self, type_: Type) -> Dim:
        """How many bytes each rank holds of a tensor; raises as `elements` does."""
        tensor = type_.value if isinstance(type_, PendingType) else type_
        return as_dim(self.elements(tensor) * sympy.Rational(tensor.dtype.bits, 8))

    def _divided(self, tensor: TensorType, dim: int, extent: Dim, axis: str) -> Dim:
        size = self._sizes[axis]
        if size is None:
            raise ValueError(f"dim {dim} of {tensor} lies over {axis}, whose size is known at launch only")
        divided = share(extent, size, self._multiples)
        if divided is None:
            raise ValueError(f"dim {dim} of {tensor}, {dim_text(extent)}, does not divide over {axis}={size}")
        return divided

    def read_back(self, type_: Type) -> str | None:
        """A dim of a tensor whose extent the host reads at run time, on each rank its own; None where there is none."""
        tensor = type_.value if isinstance(type_, PendingType) else type_
        names = (name for extent in tensor.shape for name in sorted(names_in(extent)))
        return next((name for name in names if self._dims[name].extent is Extent.HOST), None)

    def _bounded(self, extent: Dim) -> Dim:
        """A ragged extent is stored up to its bound."""
        for name in names_in(extent):
            bound = self._dims[name].bound
            if bound is not None:
                extent = substitute(extent, {name: bound})
        return extent
