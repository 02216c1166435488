"""pad-to-capacity: every expert has exactly as many rows as its capacity, zeros where it has no token.

    %w, %i = moe_capacity(%weights, %indices) {factor = 1.25, num_experts = 8}
    %rows, %order, %offsets = moe_dispatch(%x, %i)                  f32[2*B*S, 64]
    %y = grouped_matmul(%rows, %weight, %offsets)
    %out = moe_combine(%y, %w, %order, %offsets)
==>
    %rows, %places = padded_dispatch(%x, %i) {factor = 1.25}        f32[8*ceiling(5*B*S/16), 64]
    %ends = even_ends(%rows) {num_experts = 8}
    %y = grouped_matmul(%rows, %weight, %ends)
    %out = padded_combine(%y, %w, %places)

What is computed stays; no extent depends on what routers choose, so ranks that share experts send each other equally
many rows (`expert-dispatch`). Zeros are multiplied, too: without a bias they give zeros, with one nobody reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from mgraph.errors import PassError
from mgraph.ir.builder import FunctionBuilder, rebuild
from mgraph.ir.dims import Dim
from mgraph.ir.graph import Function, Module, Node, Value
from mgraph.passes.base import Pass, Report, Stage, Tier
from mgraph.passes.expert_dispatch import with_rows

_HINT = "capacity_factor of a zoo model, or without --pad-to-capacity"


@dataclass(frozen=True)
class PadToCapacity(Pass):
    """Lay out the rows of all experts that have a capacity by it."""

    name: ClassVar[str] = "pad-to-capacity"
    stage: ClassVar[Stage] = Stage.DERIVE
    tier: ClassVar[Tier] = Tier.REASSOCIATING  # products of other shapes
    requires: ClassVar[frozenset[str]] = frozenset({"forward"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"expert-dispatch"})

    def run(self, module: Module, report: Report) -> Module:
        """Rewrite every function that has experts. Raises PassError where none has, or some have no capacity."""
        functions = dict(module.functions)
        for name, function in module.functions.items():
            if any(node.op == "moe_dispatch" for node in function.nodes):
                functions[name] = _Function(function, self.name, report).rewritten()
        if not report.matches:
            raise PassError("the model has no experts that could have a capacity", "--pad-to-capacity", _HINT)
        return module if functions == dict(module.functions) else _with(module, functions)


def _with(module: Module, functions: Mapping[str, Function]) -> Module:
    for function in functions.values():
        module = module.with_function(function)
    return module


@dataclass
class _Function:
    """One function while it is rewritten."""

    source: Function
    made_by: str
    report: Report
    old: dict[Value, Dim] = field(default_factory=dict)
    """Values that have a row for each pair of a token and an expert, in the old graph, and how many rows that are."""
    places: dict[Value, Value] = field(default_factory=dict)
    """By the order of a dispatch: the places of its pairs."""

    def rewritten(self) -> Function:
        """The function with rows by capacity."""
        builder = rebuild(self.source, self.made_by)
        for node in self.source.nodes:
            with builder.at(node):
                if node.op == "moe_dispatch":
                    self._dispatch(builder, node)
                elif node.op == "moe_combine" and node.operands[2] in self.places:
                    rows, weights = (builder.value(v) for v in node.operands[:2])
                    operands = (rows, weights, self.places[node.operands[2]])
                    made = builder.emit("padded_combine", operands, dict(node.attrs), names=[node.result.name])
                    builder.replace(node.result, made[0])
                elif (given := next((v for v in node.operands if v in self.old), None)) is not None:
                    self._within(builder, node, given)
                else:
                    builder.keep(node)
        return builder.build(self.source.results)

    def _dispatch(self, builder: FunctionBuilder, node: Node) -> None:
        x, indices = node.operands
        makers = self.source.producers()
        capacity = makers.get(indices)
        while capacity is not None and capacity.op == "moe_drop_padding":  # behind a router that does not know of it
            capacity = makers.get(capacity.operands[1])
        if capacity is None or capacity.op != "moe_capacity":
            path = node.origin.path or node.id
            raise PassError(f"the experts of {path} have no capacity", "--pad-to-capacity", _HINT)
        experts = capacity.attrs["num_experts"]
        attrs = {"num_experts": experts, "factor": capacity.attrs["factor"]}
        operands = (builder.value(x), builder.value(indices))
        rows, places = builder.emit("padded_dispatch", operands, attrs, names=("rows", "places"))
        ends = builder.one("even_ends", rows, num_experts=experts, name="ends")
        builder.replace(node.results[0], rows)
        builder.replace(node.results[2], ends)
        self.old[node.results[0]] = node.results[0].tensor.shape[0]
        self.places[node.results[1]] = places
        self.report.match(self.source.name, node.id, f"{experts} experts, each with {rows.tensor.shape[0]} / {experts}")

    def _within(self, builder: FunctionBuilder, node: Node, given: Value) -> None:
        """A node on rows, of which there are others now."""
        old, new = self.old[given], builder.value(given).tensor.shape[0]
        operands = [builder.value(v) for v in node.operands]
        for value, made in zip(node.results, with_rows(builder, node, operands, old, new), strict=True):
            builder.replace(value, made)
            self.old[value] = old
