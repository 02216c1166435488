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

from dataclasses import dataclass, replace
from typing import ClassVar

from mgraph.errors import PassError
from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.dims import as_dim
from mgraph.ir.graph import Function, Module, Node, Value
from mgraph.ir.types import Shard
from mgraph.passes.base import Pass, Report, Stage, Tier
from mgraph.passes.parallel_sites import NoSite, heads
from mgraph.passes.widening import Widening


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
    parts = int(str(attention.operands[1].tensor.shape[1]))

    def view(builder: FunctionBuilder, weight: Value, place: Shard) -> Value:
        name = f"{weight.name.rpartition('.')[2]}_repeated"
        return builder.one("repeat_parts", weight, name=name, dim=place.dim, parts=parts, times=times)

    shared = heads(function, attention)[1]
    return Widening(shared, {attention: {}}, lambda extent: as_dim(extent * times), view).function(made_by)
