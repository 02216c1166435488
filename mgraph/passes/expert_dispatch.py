"""expert-dispatch: tokens go to their experts and come back by ops of their own, which a mesh axis then divides.

    %rows, %order, %offsets = moe_dispatch(%x, %indices)            f32[2*B*S, 64]
    %y = grouped_matmul(%rows, %w, %offsets)
    %out = moe_combine(%y, %weights, %order)
==>
    %x_sent, %weights_sent, %own = expert_send(%x, %weights, %indices)      f32[R, 64], f32[R, 2], i64[R, 2]
    %rows, %order, %offsets = moe_dispatch(%x_sent, %own) {others = true}   f32[2*R, 64]
    %y = grouped_matmul(%rows, %w, %offsets)
    %combined = moe_combine(%y, %weights_sent, %order, %offsets)            f32[R, 64]
    %out = expert_return(%combined, %indices)                               f32[B*S, 64]

With `chunks` this is done for some tokens after the others, which `overlap-experts` lets run beside one another:

    %x_0, %x_1 = split_rows(%x) {parts = 2}        …        %out = join_rows(%out_0, %out_1)

Rows by capacity (`pad-to-capacity`) go as they are, by `padded_send` and `padded_return`:

    %rows, %places = padded_dispatch(%x, %indices)           %sent = padded_send(%rows)  %ends = even_ends(%sent)
    %out = padded_combine(%y, %weights, %places)             %out = padded_combine(padded_return(%y), %weights, %places)

R, the rows that a rank receives, is a ragged dim of the module. On one rank nothing is sent: R is the number of tokens.
Some of a token's experts are others' (`others`): their rows come last, and are neither computed nor read.
It is before autodiff, so that the ways of gradients follow from these; `expert-parallel` then sends over an axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from mgraph.errors import PassError
from mgraph.ir.builder import FunctionBuilder, rebuild
from mgraph.ir.dims import Dim, Extent, NamedDim, as_dim, symbol
from mgraph.ir.graph import Fact, Function, Module, Node, Value
from mgraph.ir.types import TensorType
from mgraph.passes.base import Pass, Report, Stage, Tier

SEQUENCE = "S"
"""The named dim of the tokens of a sequence."""
RECEIVED = "R"
"""The ragged dim of the rows that a rank receives."""
PADDED = "padded_dispatch"
"""The op that lays out rows by capacity."""


@dataclass(frozen=True)
class ExpertDispatch(Pass):
    """Give the experts of every layer their own ways, for an axis of `size` ranks that are to share them, on which
    tokens go in `chunks` messages, `exact` of as many rows as there are."""

    size: int = 2
    chunks: int = 1
    exact: bool = False

    name: ClassVar[str] = "expert-dispatch"
    stage: ClassVar[Stage] = Stage.DERIVE
    tier: ClassVar[Tier] = Tier.REASSOCIATING  # chunks are other products
    requires: ClassVar[frozenset[str]] = frozenset({"forward"})
    provides: ClassVar[frozenset[str]] = frozenset({"expert-dispatch"})

    def __post_init__(self) -> None:
        if self.size < 1:
            raise PassError(f"the axis has size {self.size}", hint="a size of at least 1")
        if self.chunks < 1:
            raise PassError(f"tokens go in {self.chunks} chunks", hint="at least 1")

    def on_twin(self, real: Module) -> Pass:
        """For two ranks."""
        return replace(self, size=min(self.size, 2))

    def run(self, module: Module, report: Report) -> Module:
        """Rewrite every function that has experts. Raises PassError where none has, or `size` does not divide them."""
        dims: dict[str, NamedDim] = dict(module.dims)
        functions = dict(module.functions)
        for name, function in module.functions.items():
            found = [node for node in function.nodes if node.op in ("moe_dispatch", PADDED)]
            for node in found:
                self._check(node)
                report.match(name, node.id, f"{node.attrs['num_experts']} experts")
            if any(node.op == PADDED for node in found):
                functions[name] = _padded(function, self.name)
            elif found:
                functions[name] = _Function(function, dims, self).rewritten()
        if not report.matches:
            hint = "a mesh without ep, or a model whose experts are found (mgraph explain PKG raise-moe says why not)"
            raise PassError("the model has no experts that ranks could share", "--mesh", hint)
        facts = module.facts
        if self.chunks > 1:
            if SEQUENCE not in dims:
                raise PassError(
                    f"the model has no dim {SEQUENCE} of the tokens of a sequence", "--ep-chunks", "without it"
                )
            facts = (*facts, Fact(f"{SEQUENCE} % {self.chunks} == 0"))
        return replace(module, dims=dims, facts=facts, functions=functions)

    def _check(self, node: Node) -> None:
        experts, size = int(str(node.attrs["num_experts"])), self.size
        if experts % size:
            raise PassError(
                f"ep={size} does not divide the {experts} experts of {node.origin.path or node.id}",
                str(node.origin),
                f"an ep that divides {experts}",
            )
        if node.op == PADDED and (self.exact or self.chunks > 1):
            option = "--expert-extent" if self.exact else "--ep-chunks"
            what = "rows by capacity go in one message of a known size"
            raise PassError(what, option, f"without {option}, or without --pad-to-capacity")


def _padded(source: Function, made_by: str) -> Function:
    """The function with a way there and back around experts whose rows lie by capacity."""
    builder = rebuild(source, made_by)
    experts = {node.results[1]: node.attrs["num_experts"] for node in source.nodes if node.op == PADDED}
    for node in source.nodes:
        with builder.at(node):
            if node.op == "padded_combine":
                rows, *others = (builder.value(v) for v in node.operands)
                back = builder.one("padded_return", rows, name="returned", num_experts=experts[others[-1]])
                made = builder.emit(node.op, (back, *others), node.attrs, names=[node.result.name])
                builder.replace(node.result, made[0])
                continue
            builder.keep(node)
            if node.op == PADDED:
                rows = node.results[0]
                builder.replace(
                    rows, builder.one("padded_send", rows, name="sent", num_experts=node.attrs["num_experts"])
                )
    return builder.build(source.results)


@dataclass
class _Function:
    """One function while it is rewritten."""

    source: Function
    dims: dict[str, NamedDim]
    options: ExpertDispatch
    dispatches: dict[Value, list[_Way]] = field(default_factory=dict)
    """By the order of each dispatch: the ways of its chunks."""
    inside: dict[Value, list[tuple[_Way, Value]]] = field(default_factory=dict)
    """Values that have a row for each pair of a token and an expert, and those of each expert: what they are now."""

    def rewritten(self) -> Function:
        """The function with a way there and back around all experts."""
        builder = rebuild(self.source, self.options.name)
        known = set(self.source.inputs())
        combines = {node.operands[2]: node for node in self.source.nodes if node.op == "moe_combine"}
        for node in self.source.nodes:
            with builder.at(node):
                if node.op == "moe_dispatch":
                    combine = combines.get(node.results[1])
                    if combine is None:
                        raise PassError(f"%{node.id} dispatches rows that are not combined", str(node.origin))
                    self._send(builder, node, combine, known)
                elif node.op == "moe_combine" and node.operands[2] in self.dispatches:
                    self._return(builder, node)
                else:
                    self._within(builder, node)
            known.update(node.results)
        return builder.build(self.source.results)

    def _parts(self, builder: FunctionBuilder, value: Value) -> Sequence[Value]:
        """A value of tokens by chunks."""
        value = builder.value(value)
        chunks = self.options.chunks
        if chunks == 1:
            return [value]
        return builder.emit("split_rows", (value,), {"parts": chunks}, names=[value.name] * chunks)

    def _send(self, builder: FunctionBuilder, node: Node, combine: Node, known: set[Value]) -> None:
        x, indices = node.operands
        weights = combine.operands[1]
        tensors = [v for v in (x, weights) if v is x or v in known or v.is_state]
        parts = [self._parts(builder, v) for v in (*tensors, indices)]
        ways: list[_Way] = []
        made: list[Sequence[Value]] = []
        for *given, chosen in zip(*parts, strict=True):
            extent = Extent.HOST if self.options.exact else Extent.BOUND
            received = _received(self.dims, chosen.tensor.shape[0], extent)
            way = _Way(received, chosen, int(str(node.attrs["num_experts"])))
            if self.options.exact:
                ranks = self.options.size
                way.sizes = (builder.one("expert_sizes", chosen, **way.attrs, ranks=ranks, name="sizes"),)
            names = [*(f"{v.name}_sent" for v in tensors), "own"]
            *sent, own = builder.emit("expert_send", (*given, *way.last), {**way.attrs, "choices": True}, names=names)
            way.weights = sent[1] if len(sent) == 2 else None
            attrs = {**node.attrs, "others": True}
            made.append(builder.emit("moe_dispatch", (sent[0], own), attrs, names=("rows", "order", "offsets")))
            way.offsets, way.rows = made[-1][2], node.results[0].tensor.shape[0]
            ways.append(way)
        self.dispatches[node.results[1]] = ways
        for index, value in enumerate(node.results):
            self.inside[value] = [(way, results[index]) for way, results in zip(ways, made, strict=True)]

    def _return(self, builder: FunctionBuilder, node: Node) -> None:
        rows, weights, order = node.operands[:3]
        ways = self.dispatches[order]
        if ways[0].weights is None:
            for way, part in zip(ways, self._parts(builder, weights), strict=True):
                way.weights = builder.emit("expert_send", (part, *way.last), way.attrs, names=["weights_sent"])[0]
        returned: list[Value] = []
        for chunk, way in enumerate(ways):
            assert way.offsets is not None and way.weights is not None, "sent before"
            operands = (self.inside[rows][chunk][1], way.weights, self.inside[order][chunk][1], way.offsets)
            combined = builder.one("moe_combine", *operands, name="combined", **node.attrs)
            attrs = way.attrs
            returned += builder.emit("expert_return", (combined, *way.last), attrs, names=[node.result.name])
        if len(ways) > 1:
            returned = [builder.one("join_rows", *returned, name=node.result.name)]
        builder.replace(node.result, returned[0])

    def _within(self, builder: FunctionBuilder, node: Node) -> None:
        """A node that may work on rows: these are others now, and so are its results."""
        ways = next(([way for way, _ in self.inside[v]] for v in node.operands if v in self.inside), None)
        if ways is None:
            builder.keep(node)
            return
        made: list[Sequence[Value]] = []
        for chunk, way in enumerate(ways):
            operands = [self.inside[v][chunk][1] if v in self.inside else builder.value(v) for v in node.operands]
            made.append(with_rows(builder, node, operands, way.rows, way.new_rows))
        for index, value in enumerate(node.results):
            self.inside[value] = [(way, results[index]) for way, results in zip(ways, made, strict=True)]


@dataclass
class _Way:
    """What is known of the way to the experts of one dispatch, or of one chunk of it."""

    received: str
    indices: Value
    num_experts: int
    weights: Value | None = None
    offsets: Value | None = None
    rows: Dim = 0
    sizes: tuple[Value, ...] = ()
    """Of its messages, where the host reads them."""

    @property
    def attrs(self) -> dict[str, Any]:
        """Of the ops of the way."""
        return {"num_experts": self.num_experts, "rows": self.received, **({"exact": True} if self.sizes else {})}

    @property
    def last(self) -> tuple[Value, ...]:
        """What its ops take behind what goes on it."""
        return *self.sizes, self.indices

    @property
    def new_rows(self) -> Dim:
        """How many rows the experts see now."""
        return as_dim(symbol(self.received) * self.indices.tensor.shape[1])


def _received(dims: dict[str, NamedDim], tokens: Dim, extent: Extent) -> str:
    """The ragged dim of what is received of so many tokens, declared where it is new; each way has one of its own where
    the host reads its extent."""
    number = 0
    while True:
        name = RECEIVED + (str(number) if number else "")
        new = name not in dims
        if new:
            dims[name] = NamedDim(name, 0, None, tokens, extent)
        if new or (dims[name].bound == tokens and extent is not Extent.HOST):
            return name
        number += 1


def with_rows(builder: FunctionBuilder, node: Node, operands: Sequence[Value], old: Dim, new: Dim) -> Sequence[Value]:
    """The results of a node that works row by row, where experts have another number of rows."""
    types = [v.type for v in node.results]
    if not all(isinstance(t, TensorType) and t.shape[:1] == (old,) for t in types) or node.op == "call":
        what = f"{node.op} %{node.id} reads the rows of experts in a way that allows no others"
        raise PassError(what, str(node.origin), "a mesh without ep, and without --pad-to-capacity")
    made = [TensorType(v.tensor.dtype, (new, *v.tensor.shape[1:])) for v in node.results]
    names = [v.name for v in node.results]
    return builder.emit(node.op, operands, _changed(node.attrs, old, new), types=made, names=names)


def _changed(attrs: Mapping[str, Any], old: Dim, new: Dim) -> dict[str, Any]:
    """Attributes in which shapes have the new number of rows."""
    return {k: tuple(new if d == old else d for d in v) if isinstance(v, tuple) else v for k, v in attrs.items()}
