"""repeat-heads: key and value heads are repeated where an axis has more ranks than there are of them.

With 2 key/value heads of 16 and an axis of 4:

    %k = aten.linear(%x, %attn.k.weight)                       f32[B, S, 32]
    %k_heads = reshape(%k) {shape = (B, S, 2, 16)}             f32[B, S, 2, 16]
==>
    %weight_repeated = repeat_parts(%attn.k.weight) {dim = 0, parts = 2, times = 2}
    %k = aten.linear(%x, %weight_repeated)                             f32[B, S, 64]
    %k_heads = reshape(%k) {shape = (B, S, 4, 16)}             f32[B, S, 4, 16]

The attention is the same, as its query heads come in groups that share a head. It is the weights that are repeated, and
not what they make, so that everything between them and the attention is split over the axis as usual: a rank takes the
one head that its query heads read, and computes no other. The weight stays one state of the model's own shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from mgraph.errors import PassError
from mgraph.ir.builder import FunctionBuilder, rebuild
from mgraph.ir.dims import as_dim
from mgraph.ir.graph import Function, Module, Node, Value
from mgraph.ir.local import SHAPE_ATTRS
from mgraph.ir.types import Placement, Shard
from mgraph.passes.base import Pass, Report, Stage, Tier
from mgraph.passes.parallel_sites import NoSite, Walk, heads


@dataclass(frozen=True)
class RepeatHeads(Pass):
    """Repeat key and value heads for an axis of `size` ranks that is a multiple of their number."""

    size: int = 2

    name: ClassVar[str] = "repeat-heads"
    stage: ClassVar[Stage] = Stage.DERIVE
    tier: ClassVar[Tier] = Tier.REASSOCIATING
    requires: ClassVar[frozenset[str]] = frozenset({"forward"})

    def __post_init__(self) -> None:
        if self.size < 1:
            raise PassError(f"the axis has size {self.size}", hint="a size of at least 1")

    def run(self, module: Module, report: Report) -> Module:
        """Rewrite every function with an attention that needs it."""
        made = {name: self._function(f, report) for name, f in module.functions.items()}
        changed = any(made[name] is not f for name, f in module.functions.items())
        return replace(module, functions=made) if changed else module

    def _function(self, function: Function, report: Report) -> Function:
        while True:
            node = next((n for n in function.nodes if n.op == "attention" and self._times(n) > 1), None)
            if node is None:
                return function
            try:
                function = _repeated(function, node, self._times(node), self.name)
            except NoSite as why:
                report.near_miss(function.name, node.id, self.name, "every weight around is found", str(why))
                return function
            report.match(function.name, node.id, f"key and value heads of %{node.id} repeated for {self.size} ranks")

    def _times(self, node: Node) -> int:
        """How often each key/value head is there in the end; 1 where nothing is to be done, or can be."""
        queries, shared = (node.operands[i].tensor.shape[1] for i in (0, 1))
        if not isinstance(queries, int) or not isinstance(shared, int):
            return 1
        return self.size // shared if self.size % shared == 0 and queries % self.size == 0 else 1


def _repeated(function: Function, attention: Node, times: int, made_by: str) -> Function:
    """The function with the heads of one attention repeated. Raises NoSite where that cannot be."""
    _, walk = heads(function, attention)
    _refuse_other_readers(function, attention, walk)
    parts = int(str(attention.operands[1].tensor.shape[1]))
    builder = rebuild(function, made_by)
    weights: dict[Value, Value] = {}
    for node in function.nodes:
        rule = walk.rules.get(node)
        if rule is None:
            builder.keep(node)
            continue
        with builder.at(node):
            operands = []
            for value in node.operands:
                if value in walk.weights and value not in weights:
                    weights[value] = _repeated_weight(builder, value, walk.weights[value], parts, times)
                operands.append(weights.get(value, builder.value(value)))
        results = tuple(_wider(v, place, times) for v, place in zip(node.results, rule.results, strict=True))
        builder.nodes.append(
            replace(node, operands=tuple(operands), results=results, attrs=_attrs(node, rule.results, results))
        )
        for old, new in zip(node.results, results, strict=True):
            builder.replace(old, new)
    return builder.build(function.results)


def _repeated_weight(builder: FunctionBuilder, weight: Value, place: Shard, parts: int, times: int) -> Value:
    name = f"{weight.name.rpartition('.')[2]}_repeated"
    return builder.one("repeat_parts", weight, name=name, dim=place.dim, parts=parts, times=times)


def _refuse_other_readers(function: Function, attention: Node, walk: Walk) -> None:
    """What becomes wider must be read by nothing else."""
    made = {value for node in walk.rules for value in node.results}
    for value in made:
        others = [n for n in walk.users.get(value, ()) if n is not attention and n not in walk.rules]
        if others or value in function.results:
            reader = f"{others[0].op} %{others[0].id}" if others else "the caller"
            raise NoSite(f"%{value.name} is read by {reader}, too")


def _wider(value: Value, place: Placement | None, times: int) -> Value:
    """The value with more heads, under its name."""
    if not isinstance(place, Shard):
        return value
    shape = list(value.tensor.shape)
    shape[place.dim] = as_dim(shape[place.dim] * times)
    return Value(value.name, value.tensor.with_shape(*shape))


def _attrs(node: Node, places: tuple[Placement | None, ...], results: tuple[Value, ...]) -> Mapping[str, Any]:
    """Attributes that repeat the shape of the only result follow it."""
    place = places[0]
    if len(results) != 1 or not isinstance(place, Shard):
        return node.attrs
    attrs: dict[str, Any] = dict(node.attrs)
    for name in SHAPE_ATTRS:
        shape = attrs.get(name)
        if isinstance(shape, tuple) and shape[place.dim] == node.result.tensor.shape[place.dim]:
            attrs[name] = (*shape[: place.dim], results[0].tensor.shape[place.dim], *shape[place.dim + 1 :])
    return attrs
