"""expert-budget: what a budget of rows has no room for is counted, and `finish` tells it, so that a run ends there.

    func @layer.fwd(%x; …) { … %x_sent, %own = expert_send(%x, %indices) {choices = true, …} … }
==>
    func @layer.fwd(%x; …, %overrun) { …
        %x_sent, %own = expert_send(%x, %indices) {choices = true, …}
        %over = expert_overrun(%indices) {ranks = 2, …}        i64[2]: by the rank that sends
        %new_overrun = accumulate(%overrun, %over) … }
    func @finish(%lr) { … %expert_overruns = join_loads(@….overrun, …) … }

`expert-parallel` with a budget gives `expert_overrun` its meaning; on one rank nothing is sent, and all is 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from mgraph.errors import PassError
from mgraph.ir.builder import FunctionBuilder, rebuild
from mgraph.ir.graph import Function, Module, Node, Phase, Value
from mgraph.passes.base import Pass, Report, Stage, Tier
from mgraph.passes.counting import OVERRUN, Counting, with_counts_told
from mgraph.passes.expert_ways import owner_of

OVERRUNS = "expert_overruns"
"""The output of `finish` with how many tokens found no room: for each layer, by the rank that sent them."""


@dataclass(frozen=True)
class ExpertBudget(Pass):
    """Count the tokens that find no room where `size` ranks share the experts within a budget of rows."""

    size: int = 2

    name: ClassVar[str] = "expert-budget"
    stage: ClassVar[Stage] = Stage.DERIVE
    tier: ClassVar[Tier] = Tier.BITWISE
    requires: ClassVar[frozenset[str]] = frozenset({"microbatch", "finish", "expert-dispatch"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"data-parallel", "expert-parallel"})

    def on_twin(self, real: Module) -> Pass:
        """For two ranks."""
        return replace(self, size=min(self.size, 2))

    def run(self, module: Module, report: Report) -> Module:
        """Count in all entries that send tokens; `finish` tells what came before it."""
        entries = [name for name in ("microbatch", "evaluate", "predict") if name in module.entries]
        module, counts = _Overruns(module, self.name, report, size=self.size).everywhere(*entries)
        if not counts:
            what = "no tokens go to experts of other ranks by rows of which there could be too many"
            raise PassError(what, "--expert-budget", "leave it out: rows by capacity have a size that is known")
        finish, outer = module.entry_function("finish"), len(module.entries["finish"].outputs)
        builder = rebuild(finish, self.name)
        builder.phase, builder.origin = Phase.OPTIMIZER, finish.nodes[0].origin
        for node in finish.nodes:
            builder.keep(node)
        told, zeros, module = with_counts_told(module, builder, OVERRUNS, counts, [self.size] * len(counts))
        results = (*finish.results[:outer], told, *finish.results[outer:], *zeros)
        return module.with_function(builder.build(results))


@dataclass
class _Overruns(Counting):
    """Counts, at each way to the experts, the tokens that find no room."""

    size: int = 2

    suffix: ClassVar[str] = OVERRUN

    def counted(self, builder: FunctionBuilder, function: Function, node: Node) -> tuple[Value, Value] | None:
        """A way there that takes choices along."""
        if node.op != "expert_send" or not node.attrs.get("choices"):
            return None
        indices = node.operands[-1]
        attrs = {"num_experts": node.attrs["num_experts"], "rows": node.attrs["rows"], "ranks": self.size}
        (over,) = builder.emit("expert_overrun", (indices,), attrs, names=["over"])
        return owner_of(function, node, indices), over
