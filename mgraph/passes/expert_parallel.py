"""expert-parallel: the ranks of data axes share the experts; each token is sent to the ranks that have its experts.

    %x_sent, %weights_sent, %own = expert_send(%x, %weights, %indices)
==>
    %places = expert_places(%indices) {ranks = 2}                            i64[B*S, 2]
    %x_packed = pack_rows(%x, %places)                                       f32[R, 64]
    …
    %x_sent, %weights_sent, %choices = all_to_all(%x_packed, …) {axis = "ep"}
    %own = own_choices(%choices, %index)

    %out = expert_return(%combined, %indices)
==>
    %back = all_to_all(%combined) {axis = "ep"}
    %out = unpack_rows(%back, %places)

A token goes once to each rank that has any of its experts, and comes back as one row. With `gather` all tokens go to
all ranks, and what comes back is summed on the way:

    %x_sent, … = all_gather(%x, …)            %out = reduce_scatter(%combined)

Rows have room for the worst case, all tokens of all ranks on one: R <= ranks * B*S. With a `budget` each rank has room
for a part of the tokens of each other; `expert-budget` has put `expert_overrun` where tokens are sent, which counts
those that find no room, so that a run ends with an error where there are any. Of ways that are `exact`
(`expert-dispatch`) the host reads how many rows there are, and messages and rows have no others:

    %sent = rows_sent(%places)                                                          i64[4]: a rank has its 2
    %received = all_to_all(%sent) {axis = "ep"}
    %sizes = read_sizes(%sent, %received)
    %tokens, %row = exact_places(%places, %sizes)                                       i64[R_sent], i64[B*S, 2]
    %x_sent, … = all_to_all(take_rows(%x, %tokens), …, %sizes) {axis = "ep", rows = "R"}

The passes of the data axes have placed the weights of experts over them (`mgraph.passes.expert_weights`), and left
their gradients alone: a rank's experts see the tokens of all ranks, so their sums are whole, and are divided by the
count of all ranks like those of any other weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from mgraph.errors import PassError
from mgraph.ir.builder import FunctionBuilder, rebuild
from mgraph.ir.dims import Extent, as_dim, symbol
from mgraph.ir.graph import Axis, Function, Module, Node, Value
from mgraph.ir.ops.expert_exchange import room
from mgraph.ir.types import DType, Placement, Shard, TensorType
from mgraph.passes.base import Pass, Report, Stage, Tier
from mgraph.passes.expert_weights import WAYS

_SENT, _BACK, _SIZES, OVERRUN = "expert_send", "expert_return", "expert_sizes", "expert_overrun"
_PADDED = ("padded_send", "padded_return")


@dataclass(frozen=True)
class ExpertParallel(Pass):
    """Send tokens over the axes of `over`, data axes of the mesh, major first; of several, `axis` names the product.

    `gather`: all tokens go to all ranks. `budget`: a rank has room for this times the rows that it receives where all
    ranks receive equally many, each token going to as many ranks as it may; 0: for all tokens.
    """

    axis: str = "ep"
    over: tuple[str, ...] = ("ep",)
    gather: bool = False
    budget: float = 0.0

    name: ClassVar[str] = "expert-parallel"
    stage: ClassVar[Stage] = Stage.SHARD
    tier: ClassVar[Tier] = Tier.REASSOCIATING
    requires: ClassVar[frozenset[str]] = frozenset({"microbatch", "finish", "expert-dispatch"})
    provides: ClassVar[frozenset[str]] = frozenset({"expert-parallel"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"expert-parallel"})

    def run(self, module: Module, report: Report) -> Module:
        """Replace the ways by collectives, in every function."""
        sizes = {axis.name: axis.size for axis in module.mesh}
        missing = [axis for axis in self.over if not sizes.get(axis)]
        if missing:
            raise PassError(f"the mesh has no axis {missing[0]} of a known size", "--mesh", f"{missing[0]}=2")
        ranks = 1
        for axis in self.over:
            ranks *= sizes[axis] or 1
        name, mesh = self.over[0], module.mesh
        if len(self.over) > 1:
            name, mesh = self.axis, (*mesh, Axis(self.axis, None, self.over))
        if ranks == 1:
            return module
        used = {str(n.attrs["rows"]) for _, n in module.walk() if n.op in (_SENT, _BACK)}
        exact = any(n.attrs.get("exact") for _, n in module.walk() if n.op in (_SENT, _BACK))
        self._check(module, exact)
        parts = {rows: self._part(module, rows, ranks) for rows in used}
        dims = dict(module.dims)
        for rows in sorted(used):
            dim = dims[rows]
            assert dim.bound is not None, f"{rows} is ragged"
            extent = Extent.HOST if exact else Extent.BUDGET if self.budget else Extent.BOUND
            dims[rows] = replace(dim, bound=as_dim(ranks * room(dim.bound, parts[rows])), extent=extent)
            if exact:
                dims[_sent(rows)] = replace(dims[rows], name=_sent(rows))
        functions = {}
        for function_name, function in module.functions.items():
            if any(node.op in (*WAYS, _SIZES) for node in function.nodes):
                functions[function_name] = _Ways(function, name, ranks, self, report, parts).rewritten()
        return replace(module, mesh=mesh, dims=dims, functions={**module.functions, **functions})

    def _check(self, module: Module, exact: bool) -> None:
        """Refuse what contradicts itself."""
        hint = "leave it out, or --dispatch alltoall"
        padded = any(node.op in _PADDED for _, node in module.walk())
        if padded and self.gather:
            raise PassError("rows by capacity go to the ranks of their experts alone", "--pad-to-capacity", hint)
        if self.budget and self.gather:
            raise PassError("a budget is for tokens that go to some ranks alone", "--expert-budget", hint)
        if exact and self.gather:
            raise PassError("all ranks get all tokens: there are no sizes to read", "--expert-extent", hint)
        if exact and self.budget:
            raise PassError(
                "rows have room for a budget, or for exactly what there is", "--expert-budget", "leave one of both out"
            )

    def _part(self, module: Module, rows: str, ranks: int) -> float:
        """The part of its tokens for which a rank has room on another; 1.0: all."""
        if not self.budget:
            return 1.0
        sent = [n for _, n in module.walk() if n.op == _SENT and n.attrs["rows"] == rows]
        choices = max(int(str(n.operands[-1].tensor.shape[1])) for n in sent)
        return min(1.0, self.budget * min(choices, ranks) / ranks)


@dataclass
class _Ways:
    """One function while its ways are replaced."""

    source: Function
    axis: str
    ranks: int
    options: ExpertParallel
    report: Report
    parts: Mapping[str, float]
    """How much of its tokens a rank may send to another, by the ragged dim of what is received."""
    _all_places: dict[Value, Value] = field(default_factory=dict)
    _places: dict[Value, Value] = field(default_factory=dict)
    _orders: dict[Value, tuple[Value, Value]] = field(default_factory=dict)
    _index: Value | None = None

    def rewritten(self) -> Function:
        """The function with collectives."""
        builder = rebuild(self.source, self.options.name)
        for node in self.source.nodes:
            with builder.at(node):
                if node.op == _SENT:
                    self._send(builder, node)
                elif node.op == _BACK:
                    self._return(builder, node)
                elif node.op in _PADDED:
                    self._padded(builder, node)
                elif node.op == OVERRUN:
                    self._overrun(builder, node)
                elif node.op == _SIZES:
                    self._read(builder, node)
                else:
                    builder.keep(node)
        return builder.build(self.source.results)

    def _send(self, builder: FunctionBuilder, node: Node) -> None:
        *tensors, indices = (builder.value(v) for v in node.operands)
        choices = bool(node.attrs.get("choices"))
        sizes = tensors.pop() if node.attrs.get("exact") else None
        sent, packed = [*tensors, indices] if choices else tensors, list[Value]()
        names = [v.name for v in node.results]
        types = [v.tensor for v in node.results]
        if sizes is not None:
            rows = str(node.attrs["rows"])
            tokens, _ = self._exact(builder, node, indices, sizes)
            for value, type_ in zip(sent, types, strict=True):
                type_ = replace(type_, shape=(symbol(_sent(rows)), *type_.shape[1:]))
                packed += builder.emit("take_rows", (value, tokens), types=[type_], names=[f"{value.name}_packed"])
            attrs: dict[str, object] = {"axis": self.axis, "split_dim": 0, "join_dim": 0, "rows": rows}
            got = builder.emit("all_to_all", (*packed, sizes), attrs, types=types, names=names)
        elif self.options.gather:
            attrs = {"axis": self.axis, "dim": 0, "extent": types[0].shape[0]}
            got = builder.emit("all_gather", sent, attrs, types=types, names=names)
        else:
            for value, type_ in zip(sent, types, strict=True):
                fill = {"fill": -1} if value is indices else {}
                attrs = {"rows": node.attrs["rows"], **fill, **self._room(node)}
                operands = (value, self._place(builder, node, indices))
                packed += builder.emit("pack_rows", operands, attrs, types=[type_], names=[f"{value.name}_packed"])
            attrs = {"axis": self.axis, "split_dim": 0, "join_dim": 0}
            got = builder.emit("all_to_all", packed, attrs, types=types, names=names)
        for old, new in zip(node.results, got, strict=True):
            builder.replace(old, new)
        if choices:
            attrs = {"num_experts": node.attrs["num_experts"], "ranks": self.ranks}
            attrs |= {"used": True} if self.options.gather else {}
            own = builder.emit("own_choices", (got[-1], self._at(builder)), attrs, types=types[-1:], names=["own"])
            builder.replace(got[-1], own[0])
            self.report.match(self.source.name, node.id, f"tokens go to {self.ranks} ranks of {self.axis}")

    def _return(self, builder: FunctionBuilder, node: Node) -> None:
        *tensors, indices = (builder.value(v) for v in node.operands)
        sizes = tensors.pop() if node.attrs.get("exact") else None
        names, types = [v.name for v in node.results], [v.tensor for v in node.results]
        backs = [f"{v.name}_back" for v in tensors]
        attrs: dict[str, object]
        if sizes is not None:
            rows = _sent(str(node.attrs["rows"]))
            attrs = {"axis": self.axis, "split_dim": 0, "join_dim": 0, "rows": rows, "back": True}
            taken = [replace(v.tensor, shape=(symbol(rows), *v.tensor.shape[1:])) for v in tensors]
            back = builder.emit("all_to_all", (*tensors, sizes), attrs, types=taken, names=backs)
            _, row = self._exact(builder, node, indices, sizes)
            made: Sequence[Value] = [
                builder.emit("unpack_rows", (value, row), {"part": 0.0}, types=[type_], names=[name])[0]
                for value, type_, name in zip(back, types, names, strict=True)
            ]
        elif self.options.gather:
            attrs = {"axis": self.axis, "dim": 0, "extent": types[0].shape[0]}
            made = builder.emit("reduce_scatter", tensors, attrs, types=types, names=names)
        else:
            attrs = {"axis": self.axis, "split_dim": 0, "join_dim": 0}
            back = builder.emit("all_to_all", tensors, attrs, types=[v.tensor for v in tensors], names=backs)
            places = self._place(builder, node, indices)
            made = [
                builder.emit("unpack_rows", (value, places), self._room(node), types=[type_], names=[name])[0]
                for value, type_, name in zip(back, types, names, strict=True)
            ]
        for old, new in zip(node.results, made, strict=True):
            builder.replace(old, new)

    def _padded(self, builder: FunctionBuilder, node: Node) -> None:
        """As many rows of each expert, which come by rank and then by expert, and go back so."""
        there, value = node.op == _PADDED[0], builder.value(node.operands[0])
        experts = int(str(node.attrs["num_experts"])) // self.ranks
        exchange = {"axis": self.axis, "split_dim": 0, "join_dim": 0}
        swap = {"first": self.ranks, "second": experts} if there else {"first": experts, "second": self.ranks}
        steps: list[tuple[str, dict[str, object]]] = [("all_to_all", {**exchange}), ("swap_blocks", {**swap})]
        for op, attrs in steps if there else reversed(steps):
            (value,) = builder.emit(op, (value,), attrs, types=[node.result.tensor], names=[node.result.name])
        builder.replace(node.result, value)
        if there:
            self.report.match(self.source.name, node.id, f"rows go to {self.ranks} ranks of {self.axis} by capacity")

    def _read(self, builder: FunctionBuilder, node: Node) -> None:
        """Ranks tell each other how many rows they send, and the host reads it."""
        places = self._place(builder, node, builder.value(node.operands[0]))
        of_rank = [(axis, _as_counts(placed)) for axis, placed in node.result.tensor.placement]
        type_ = TensorType(DType.I64, (self.ranks**2,), tuple(of_rank))
        (sent,) = builder.emit("rows_sent", (places,), types=[type_], names=["rows_sent"])
        attrs = {"axis": self.axis, "split_dim": 0, "join_dim": 0}
        (received,) = builder.emit("all_to_all", (sent,), attrs, types=[type_], names=["rows_received"])
        types = [node.result.tensor]
        (sizes,) = builder.emit("read_sizes", (sent, received), types=types, names=[node.result.name])
        builder.replace(node.result, sizes)
        self.report.match(self.source.name, node.id, "the host waits for the sizes of messages: no CUDA graph")

    def _exact(self, builder: FunctionBuilder, node: Node, indices: Value, sizes: Value) -> tuple[Value, Value]:
        """The tokens of the rows that are sent, and the rows of each token, made where they are first needed."""
        if indices not in self._orders:
            places = self._place(builder, node, indices)
            rows = _sent(str(node.attrs["rows"]))
            types = [TensorType(DType.I64, (symbol(rows),), indices.tensor.placement), places.tensor]
            names = ["tokens", "row"]
            tokens, row = builder.emit("exact_places", (places, sizes), {"rows": rows}, types=types, names=names)
            self._orders[indices] = tokens, row
        return self._orders[indices]

    def _at(self, builder: FunctionBuilder) -> Value:
        """The number of this rank."""
        if self._index is None:
            self._index = builder.one("axis_index", axis=self.axis)
        return self._index

    def _room(self, node: Node) -> dict[str, object]:
        part = self.parts[str(node.attrs["rows"])]
        return {} if part == 1.0 else {"part": part}

    def _overrun(self, builder: FunctionBuilder, node: Node) -> None:
        """What finds no room is counted; where all do, nothing is."""
        attrs = self._room(node)
        if not attrs or self.options.gather:
            attrs = {"part": 1.0}
        self._place(builder, node, builder.value(node.operands[0]))
        places = self._all_places[builder.value(node.operands[0])]
        types = [v.tensor for v in node.results]
        operands = (places, self._at(builder))
        (made,) = builder.emit("places_overrun", operands, attrs, types=types, names=[node.result.name])
        builder.replace(node.result, made)

    def _place(self, builder: FunctionBuilder, node: Node, indices: Value) -> Value:
        """Where the tokens of these choices lie, made where it is first needed."""
        if indices not in self._places:
            type_ = TensorType(DType.I64, (indices.tensor.shape[0], self.ranks), indices.tensor.placement)
            attrs = {"num_experts": node.attrs["num_experts"], "ranks": self.ranks}
            places = builder.emit("expert_places", (indices,), attrs, types=[type_], names=["places"])[0]
            self._all_places[indices] = self._places[indices] = places
            if limit := self._room(node):
                self._places[indices] = builder.emit("within_room", (places,), limit, types=[type_], names=["places"])[
                    0
                ]
        return self._places[indices]


def _sent(rows: str) -> str:
    """The ragged dim of what a rank sends, by that of what it receives."""
    return f"{rows}_sent"


def _as_counts(placed: Placement) -> Placement:
    """Where the numbers of rows lie that are sent, by where the sizes of messages lie, of which they are a row."""
    return Shard(placed.dim - 1) if isinstance(placed, Shard) else placed
