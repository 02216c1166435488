"""expert-bias: routers count how often each expert is chosen; `finish` moves biases by it, or hands the loads out.

Before (the bias is a buffer that the router only reads):

    func @layer.fwd(%x; …, %bias) { … %weights, %indices = moe_route(%logits, %bias) … }
    func @microbatch(…) { … = call @layer.fwd(…; …, @layers.0.bias) … }

After (state `layers.0.bias.load: i64[E]`, which data-parallel sums over the ranks):

    func @layer.fwd(%x; …, %bias, %load) { … %counts = expert_counts(%indices)  %new_load = accumulate(%load, %counts) }
    entry microbatch … updates (…, layers.0.bias.load)
    func @finish(%lr) { … = expert_bias_update(@layers.0.bias, @layers.0.bias.load, %finite) {rate = 0.001} … }

A router that was not raised, for the noise in its scores, say, has a bias where its choice shows one. With `report` the
choices of all routers count, those without a bias by a state beside the weight that makes their logits or, of a router
that was not raised, beside the first weight of the experts, and `finish` has an output more,
`expert_loads: i64[..]`, the loads of all layers one after the other.

A choice counts where it takes tokens to experts: where these have a capacity, what they drop is not counted. Only
forward nodes count, so recomputation counts nothing twice; evaluation has functions of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from mgraph.errors import PassError
from mgraph.ir.builder import FunctionBuilder, rebuild
from mgraph.ir.graph import Function, Module, Node, Phase, StateKind, Value
from mgraph.passes.base import Pass, Report, Stage, Tier
from mgraph.passes.counting import LOAD, Counting, with_counts_told
from mgraph.passes.expert_ways import bias_of, kept_in, num_experts, owner_of, taken_choice

LOADS = "expert_loads"
"""The output of `finish` that has the loads of all layers."""
_HINT = "a router that adds a buffer, one number for each expert, to its scores; or leave out --expert-bias-rate"


@dataclass(frozen=True)
class ExpertBias(Pass):
    """Move the biases of routers after each step by `rate` times the sign of (mean load - load); `report` the loads."""

    rate: float = 0.001
    report: bool = False

    name: ClassVar[str] = "expert-bias"
    stage: ClassVar[Stage] = Stage.DERIVE
    tier: ClassVar[Tier] = Tier.BITWISE
    requires: ClassVar[frozenset[str]] = frozenset({"microbatch", "finish"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"data-parallel"})

    def run(self, module: Module, report: Report) -> Module:
        """Count in `microbatch`, update in `finish`."""
        counting = _Loads(module, self.name, report, every=self.report, moved=bool(self.rate))
        counted, loads = counting.everywhere("microbatch")
        if self.report and not loads:
            hint = "leave it out; mgraph explain PKG raise-moe says why no experts were found in a model that has some"
            raise PassError("the model has no experts whose loads could be told", "--expert-load", hint)
        biases = [key for key in loads if key in counting.biases]
        if self.rate and not biases:
            raise PassError("no router has a bias that its load could move", "--expert-bias-rate", _HINT)
        report.count("biases", len(biases))
        if self.report:
            report.count("loads", len(loads))
        return self._update(counted, loads, biases if self.rate else [], counting.choices)

    def _update(
        self, module: Module, loads: Mapping[Value, Value], biases: Sequence[Value], choices: Mapping[Value, int]
    ) -> Module:
        finish = module.entry_function("finish")
        builder = rebuild(finish, self.name)
        builder.phase, builder.origin = Phase.OPTIMIZER, finish.nodes[0].origin
        for node in finish.nodes:
            builder.keep(node)
        (finite,) = (node.result for node in finish.nodes if node.op == "all_finite")
        entry = module.entries["finish"]
        outer = len(entry.outputs)
        new: Sequence[Value] = ()
        if biases:
            names = [f"new_{b.name.replace('.', '_')}" for b in biases]
            operands = (*biases, *(module.state[loads[b].name].value for b in biases), finite)
            new = builder.emit("expert_bias_update", operands, {"rate": self.rate}, names=names)
        if self.report:
            told, zeros, module = with_counts_told(module, builder, LOADS, loads, [choices[key] for key in loads])
            results = (*finish.results[:outer], told, *finish.results[outer:], *zeros, *new)
        else:
            states = [module.state[load.name].value for load in loads.values()]
            zeros = builder.emit("zero", states, names=[f"zero_{s.name.replace('.', '_')}" for s in states])
            entry = replace(entry, updates=(*entry.updates, *(s.name for s in states)))
            module = replace(module, entries={**module.entries, "finish": entry})
            results = (*finish.results, *zeros, *new)
        entry = module.entries["finish"]
        entry = replace(entry, updates=(*entry.updates, *(b.name for b in biases)))
        module = replace(module, entries={**module.entries, "finish": entry})
        return module.with_function(builder.build(results))


@dataclass
class _Loads(Counting):
    """Counts the choices that tokens are taken to experts by; with `every` those of routers without a bias, too."""

    every: bool = False
    moved: bool = True
    """Whether the biases are moved, which therefore have to be buffers."""
    choices: dict[Value, int] = field(default_factory=dict)
    """How many experts a token chooses, by what the load of a router belongs to."""
    biases: dict[Value, Node] = field(default_factory=dict)
    """Biases, each with the node that adds it to scores."""
    _seen: set[tuple[str, Value]] = field(default_factory=set)
    """Choices by function: copies of one share their values."""

    suffix: ClassVar[str] = LOAD

    def counted(self, builder: FunctionBuilder, function: Function, node: Node) -> tuple[Value, Value] | None:
        """A way to the experts, with the choice that takes it: that of a router, or what is given instead, or what
        experts keep of either. What they drop is no load of theirs."""
        choice = taken_choice(function, node)
        if choice is None or (function.name, choice) in self._seen:
            return None
        self._seen.add((function.name, choice))
        experts = num_experts(function, node)
        biased = bias_of(function, choice, experts)
        if not (self.every or biased):
            return None
        owner = self._bias(function, *biased) if biased else None
        owner = owner or owner_of(function, node, choice)
        self.choices[owner] = int(str(choice.tensor.shape[1]))
        return owner, builder.one("expert_counts", choice, num_experts=experts)

    def handed(self, owner: Value, slot: Value, node: Node) -> None:
        """What is handed over as a bias is a buffer, or a slot again."""
        self.choices[owner] = self.choices[slot]
        if slot in self.biases:
            self.biases[owner] = self.biases[slot]
            self._check(owner)

    def _bias(self, function: Function, bias: Value, adder: Node) -> Value | None:
        """The state or slot that has a bias; None where it is another form of one, which does to tell loads."""
        kept = kept_in(function, bias)
        if kept is None and self.moved:
            raise PassError(f"the router's bias {bias!r} is computed, and no buffer", str(adder.origin), _HINT)
        if kept is None or (kept is not bias and not self.moved):
            return None
        self.biases[kept] = adder
        self._check(kept)
        return kept

    def _check(self, bias: Value) -> None:
        """Raise PassError where a bias is to be moved that is no buffer of a number for each expert."""
        if not (self.moved and bias.is_state):
            return
        declared, where = self.module.state[bias.name], str(self.biases[bias].origin)
        if declared.kind is not StateKind.BUFFER:
            kept = "a parameter of its class" if declared.kind is StateKind.PARAM else "no buffer"
            raise PassError(f"the router's bias {bias.name} is {kept}, which the rate cannot move", where, _HINT)
        if len(bias.tensor.shape) != 1:
            raise PassError(f"the router's bias {bias.name} is {bias.tensor}, and not of one dim", where, _HINT)
