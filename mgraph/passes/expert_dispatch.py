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

R, the rows that a rank receives, is a ragged dim of the module. On one rank nothing is sent: R is the number of tokens.
Some of a token's experts are others' (`others`): their rows come last, and are neither computed nor read. So nothing
needs to clear them, as a model with a capacity does (`clear_tail`).
It is before autodiff, so that the ways of gradients follow from these; `expert-parallel` then sends over an axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from mgraph.errors import PassError
from mgraph.ir.builder import FunctionBuilder, rebuild
from mgraph.ir.dims import Dim, Extent, NamedDim, as_dim, symbol
from mgraph.ir.graph import Function, Module, Node, Value
from mgraph.ir.types import TensorType
from mgraph.passes.base import Pass, Report, Stage, Tier

RECEIVED = "R"
"""The ragged dim of the rows that a rank receives."""


@dataclass(frozen=True)
class ExpertDispatch(Pass):
    """Give the experts of every layer their own ways, for an axis of `size` ranks that are to share them."""

    size: int = 2

    name: ClassVar[str] = "expert-dispatch"
    stage: ClassVar[Stage] = Stage.DERIVE
    tier: ClassVar[Tier] = Tier.BITWISE
    requires: ClassVar[frozenset[str]] = frozenset({"forward"})
    provides: ClassVar[frozenset[str]] = frozenset({"expert-dispatch"})

    def __post_init__(self) -> None:
        if self.size < 1:
            raise PassError(f"the axis has size {self.size}", hint="a size of at least 1")

    def on_twin(self, real: Module) -> Pass:
        """For two ranks."""
        return replace(self, size=min(self.size, 2))

    def run(self, module: Module, report: Report) -> Module:
        """Rewrite every function that has experts. Raises PassError where none has, or `size` does not divide them."""
        dims: dict[str, NamedDim] = dict(module.dims)
        functions = dict(module.functions)
        for name, function in module.functions.items():
            found = [node for node in function.nodes if node.op == "moe_dispatch"]
            for node in found:
                _check(node, self.size)
                report.match(name, node.id, f"{node.attrs['num_experts']} experts")
            if found:
                functions[name] = _Function(function, dims, self.name).rewritten()
        if not report.matches:
            hint = "a mesh without ep, or a model whose experts are found (mgraph explain PKG raise-moe says why not)"
            raise PassError("the model has no experts that ranks could share", "--mesh", hint)
        return replace(module, dims=dims, functions=functions)


def _check(node: Node, size: int) -> None:
    experts = int(str(node.attrs["num_experts"]))
    if experts % size:
        raise PassError(
            f"ep={size} does not divide the {experts} experts of {node.origin.path or node.id}",
            str(node.origin),
            f"an ep that divides {experts}",
        )


@dataclass
class _Function:
    """One function while it is rewritten."""

    source: Function
    dims: dict[str, NamedDim]
    made_by: str
    dispatches: dict[Value, _Way] = field(default_factory=dict)
    """By the order of each dispatch."""
    inside: dict[Value, _Way] = field(default_factory=dict)
    """Values that have a row for each pair of a token and an expert."""

    def rewritten(self) -> Function:
        """The function with a way there and back around all experts."""
        builder = rebuild(self.source, self.made_by)
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
                elif node.op == "clear_tail" and node.operands[0] in self.inside:
                    builder.replace(node.result, builder.value(node.operands[0]))
                    self.inside[node.result] = self.inside[node.operands[0]]
                else:
                    self._within(builder, node)
            known.update(node.results)
        return builder.build(self.source.results)

    def _send(self, builder: FunctionBuilder, node: Node, combine: Node, known: set[Value]) -> None:
        x, indices = node.operands
        weights = combine.operands[1]
        way = _Way(_received(self.dims, indices.tensor.shape[0]), indices, int(str(node.attrs["num_experts"])))
        tensors = [v for v in (x, weights) if v is x or v in known or v.is_state]
        names = [*(f"{v.name}_sent" for v in tensors), "own"]
        *sent, own = builder.emit("expert_send", (*tensors, indices), {**way.attrs, "choices": True}, names=names)
        way.weights = sent[1] if len(sent) == 2 else None
        rows, order, _ = node.results
        attrs = {**node.attrs, "others": True}
        made = builder.emit("moe_dispatch", (sent[0], own), attrs, names=("rows", "order", "offsets"))
        way.offsets = made[2]
        for old, new in zip(node.results, made, strict=True):
            builder.replace(old, new)
        self.dispatches[order] = way
        way.rows = rows.tensor.shape[0]
        self.inside[rows] = self.inside[order] = way

    def _return(self, builder: FunctionBuilder, node: Node) -> None:
        rows, weights, order = node.operands
        way = self.dispatches[order]
        if way.weights is None:
            way.weights = builder.emit("expert_send", (weights, way.indices), way.attrs, names=["weights_sent"])[0]
        assert way.offsets is not None, "sent before"
        combined = builder.one("moe_combine", rows, way.weights, order, way.offsets, name="combined", **node.attrs)
        returned = builder.emit("expert_return", (combined, way.indices), way.attrs, names=[node.result.name])[0]
        builder.replace(node.result, returned)

    def _within(self, builder: FunctionBuilder, node: Node) -> None:
        """A node that may work on rows: these are others now, and so are its results."""
        way = next((self.inside[v] for v in node.operands if v in self.inside), None)
        kept = builder.keep(node)
        if way is None:
            return
        types = [v.type for v in node.results]
        old, new = way.rows, way.new_rows
        if not all(isinstance(t, TensorType) and t.shape[:1] == (old,) for t in types) or node.op == "call":
            raise PassError(
                f"{node.op} %{node.id} reads the rows of experts in a way that ranks cannot share",
                str(node.origin),
                "a mesh without ep",
            )
        results = []
        for value in node.results:
            shape = (new, *value.tensor.shape[1:])
            results.append(Value(builder.fresh_like(value), TensorType(value.tensor.dtype, shape)))
            builder.replace(value, results[-1])
            self.inside[value] = way
        builder.nodes[-1] = replace(kept, results=tuple(results), attrs=_changed(kept.attrs, old, new))


@dataclass
class _Way:
    """What is known of the way to the experts of one dispatch."""

    received: str
    indices: Value
    num_experts: int
    weights: Value | None = None
    offsets: Value | None = None
    rows: Dim = 0

    @property
    def attrs(self) -> dict[str, Any]:
        """Of the ops of the way."""
        return {"num_experts": self.num_experts, "rows": self.received}

    @property
    def new_rows(self) -> Dim:
        """How many rows the experts see now."""
        return as_dim(symbol(self.received) * self.indices.tensor.shape[1])


def _received(dims: dict[str, NamedDim], tokens: Dim) -> str:
    """The ragged dim of what is received of so many tokens, declared where it is new."""
    number = 0
    while True:
        name = RECEIVED + (str(number) if number else "")
        if name not in dims:
            dims[name] = NamedDim(name, 0, None, tokens, Extent.BOUND)
        if dims[name].ragged and dims[name].bound == tokens:
            return name
        number += 1


def _changed(attrs: Mapping[str, Any], old: Dim, new: Dim) -> dict[str, Any]:
    """Attributes in which shapes have the new number of rows."""
    return {k: tuple(new if d == old else d for d in v) if isinstance(v, tuple) else v for k, v in attrs.items()}
