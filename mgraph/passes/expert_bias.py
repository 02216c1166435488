"""expert-bias: routers count how often each expert is chosen; `finish` moves biases by it, or hands the loads out.

Before (the bias is a buffer that the router only reads):

    func @layer.fwd(%x; …, %bias) { … %weights, %indices = moe_route(%logits, %bias) … }
    func @microbatch(…) { … = call @layer.fwd(…; …, @layers.0.bias) … }

After (state `layers.0.bias.load: i64[E]`, which data-parallel sums over the ranks):

    func @layer.fwd(%x; …, %bias, %load) { … %counts = expert_counts(%indices)  %new_load = accumulate(%load, %counts) }
    entry microbatch … updates (…, layers.0.bias.load)
    func @finish(%lr) { … = expert_bias_update(@layers.0.bias, @layers.0.bias.load, %finite) {rate = 0.001} … }

With `report` all routers count, those without a bias by a state beside the weight that makes their logits, and `finish`
has an output more, `expert_loads: i64[..]`, the loads of all layers one after the other.

Where experts have a capacity, what they drop is not counted. Only forward nodes count, so recomputation counts nothing
twice; evaluation has functions of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from mgraph.errors import PassError
from mgraph.ir.builder import FunctionBuilder, rebuild
from mgraph.ir.dims import Dim
from mgraph.ir.graph import Function, Module, Node, Phase, State, StateKind, Value
from mgraph.ir.types import Type
from mgraph.passes.base import Pass, Report, Stage, Tier
from mgraph.passes.calls import callee

_LOAD = ".load"
LOADS = "expert_loads"
"""The output of `finish` that has the loads of all layers."""


def load_states(state: Mapping[str, State]) -> list[State]:
    """The counts of choices of a module, in declaration order."""
    return [
        s for n, s in state.items() if s.kind is StateKind.SCALAR and n.endswith(_LOAD) and n[: -len(_LOAD)] in state
    ]


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
        counting = _Counting(module, self.name, report, self.report)
        entry = module.entries["microbatch"]
        function, loads = counting.function(module.entry_function("microbatch"))
        if self.report and not loads:
            hint = "leave it out; mgraph explain PKG moe_route says why no router was found in a model with experts"
            raise PassError("the model has no router whose loads could be told", "--expert-load", hint)
        biases = [key for key in loads if key in counting.biases]
        if self.rate and not biases:
            hint = (
                "a router with a buffer that is added to its scores; mgraph explain PKG moe_route says what was raised"
            )
            raise PassError("no router has a bias that its load could move", "--expert-bias-rate", hint)
        state = {**module.state, **{load.name: _declared(load) for load in loads.values()}}
        entry = replace(entry, updates=(*entry.updates, *(load.name for load in loads.values())))
        module = replace(module, state=state, entries={**module.entries, entry.name: entry})
        module = replace(module, functions={**module.functions, **counting.done, function.name: function})
        report.count("biases", len(biases))
        if self.report:
            report.count("loads", len(loads))
        return self._update(module, loads, biases if self.rate else [], counting.choices)

    def _update(
        self, module: Module, loads: Mapping[Value, Value], biases: Sequence[Value], choices: Mapping[Value, int]
    ) -> Module:
        finish, entry = module.entry_function("finish"), module.entries["finish"]
        builder = rebuild(finish, self.name)
        builder.phase, builder.origin = Phase.OPTIMIZER, finish.nodes[0].origin
        for node in finish.nodes:
            builder.keep(node)
        (finite,) = (node.result for node in finish.nodes if node.op == "all_finite")
        states = {key: module.state[load.name].value for key, load in loads.items()}
        told: list[Value] = []
        outputs = entry.outputs
        if self.report:
            attrs = {
                "layers": tuple(_layer(key.name) for key in states),
                "choices": tuple(choices[key] for key in states),
            }
            told = list(builder.emit("join_loads", tuple(states.values()), attrs, names=[LOADS]))
            outputs = (*outputs, LOADS)
        new: Sequence[Value] = ()
        if biases:
            names = [f"new_{b.name.replace('.', '_')}" for b in biases]
            operands = (*biases, *(states[b] for b in biases), finite)
            new = builder.emit("expert_bias_update", operands, {"rate": self.rate}, names=names)
        zeros = builder.emit("zero", list(states.values()), names=[f"zero_{s.name.replace('.', '_')}" for s in states])
        updates = (*entry.updates, *(b.name for b in biases), *(s.name for s in states.values()))
        entries = {**module.entries, "finish": replace(entry, outputs=outputs, updates=updates)}
        outer = len(entry.outputs)
        results = (*finish.results[:outer], *told, *finish.results[outer:], *new, *zeros)
        return replace(module, entries=entries).with_function(builder.build(results))


def _declared(load: Value) -> State:
    return State(load.name, load, StateKind.SCALAR, init=(("zeros_",),), persist=False, seed_name=load.name)


@dataclass
class _Counting:
    """Gives functions the counts of the routers in them, each function once."""

    module: Module
    made_by: str
    report: Report
    every: bool = False
    """Routers without a bias count, too."""
    choices: dict[Value, int] = field(default_factory=dict)
    """How many experts a token chooses, by what the load of a router belongs to."""
    biases: set[Value] = field(default_factory=set)
    done: dict[str, Function] = field(default_factory=dict)
    _loads: dict[str, dict[Value, Value]] = field(default_factory=dict)

    def function(self, function: Function) -> tuple[Function, dict[Value, Value]]:
        """The function, and its biases or weights with the loads that it now takes: states in an entry, else slots."""
        builder = FunctionBuilder(function.name, self.made_by, function.names())
        loads: dict[Value, Value] = {}
        totals: dict[Value, Value] = {}
        kept = {node.operands[1]: node for node in function.nodes if node.op == "moe_capacity"}
        biases: dict[Node, Value] = {}
        routed: dict[Node, Dim] = {}
        for node in function.nodes:
            if node.op == "call" and node.phase is Phase.FORWARD:
                builder.nodes.append(self._called(builder, node, loads, totals))
                continue
            builder.nodes.append(node)
            if node.op == "moe_route" and node.phase is Phase.FORWARD and (self.every or len(node.operands) == 2):
                # What experts drop is no load of theirs.
                if len(node.operands) == 2:
                    self.biases.add(node.operands[1])
                counted = kept.get(node.results[1], node)
                biases[counted], routed[counted] = _owner(function, node, self.module), node.operands[0].tensor.shape[1]
            if node in biases:
                bias, experts = biases[node], routed[node]
                self.choices[bias] = int(str(node.results[1].tensor.shape[1]))
                with builder.at(node):
                    counts = builder.one("expert_counts", node.results[1], num_experts=experts)
                    load = self._load(builder, bias, counts.type, loads)
                    totals[bias] = builder.one("accumulate", totals.get(bias, load), counts, name="new_load")
                self.report.match(function.name, node.id, f"bias {bias!r} at {node.origin}")
        nodes, slots = tuple(builder.nodes), tuple(v for v in loads.values() if not v.is_state)
        changed = replace(
            function, nodes=nodes, slots=(*function.slots, *slots), results=(*function.results, *totals.values())
        )
        return changed if loads else function, loads

    def _called(
        self, builder: FunctionBuilder, node: Node, loads: dict[Value, Value], totals: dict[Value, Value]
    ) -> Node:
        """A call that hands the loads of its biases over and takes their new values."""
        name = callee(node)
        if name not in self._loads:
            function, self._loads[name] = self.function(self.module.functions[name])
            if self._loads[name]:
                self.done[name] = function
        inner = self.module.functions[name]
        operands, results = list(node.operands), list(node.results)
        for slot in self._loads[name]:
            bias = node.operands[len(inner.params) + inner.slots.index(slot)]
            self._check_kind(bias, slot, node)
            self.choices[bias] = self.choices[slot]
            load = self._load(builder, bias, self._loads[name][slot].type, loads)
            operands.append(totals.get(bias, load))
            totals[bias] = Value(builder.fresh("new_load"), load.type)
            results.append(totals[bias])
        return node.with_values(tuple(operands), tuple(results))

    def _check_kind(self, owner: Value, slot: Value, node: Node) -> None:
        """What is handed over as a bias is a buffer, or a slot again."""
        if slot not in self.biases:
            return
        self.biases.add(owner)
        if owner.is_state and self.module.state[owner.name].kind is not StateKind.BUFFER:
            hint = "register it as a buffer"
            raise PassError(f"the router's bias {owner.name} is no buffer", str(node.origin), hint)

    def _load(self, builder: FunctionBuilder, owner: Value, type_: Type, loads: dict[Value, Value]) -> Value:
        """The load that belongs to a bias or weight: a state to a state, a slot to a slot."""
        if owner not in loads:
            name = f"{owner.name}{_LOAD}"
            loads[owner] = Value(name if owner.is_state else builder.fresh(name), type_, is_state=owner.is_state)
        return loads[owner]


def _owner(function: Function, router: Node, module: Module) -> Value:
    """What the load of a router belongs to: its bias, or else the weight that makes its logits."""
    if len(router.operands) == 2:
        bias = router.operands[1]
        if not bias.is_state and bias not in function.slots:
            raise PassError(
                f"the router's bias {bias!r} is no buffer", str(router.origin), "add a buffer to the scores"
            )
        if bias.is_state and module.state[bias.name].kind is not StateKind.BUFFER:
            raise PassError(
                f"the router's bias {bias.name} is no buffer", str(router.origin), "register it as a buffer"
            )
        return bias
    experts, made = router.operands[0].tensor.shape[1], function.producers()
    ahead = [router.operands[0]]
    for value in ahead:
        if (
            (value.is_state or value in function.slots)
            and experts in value.tensor.shape
            and len(value.tensor.shape) > 1
        ):
            return value
        ahead += [v for v in made[value].operands if v not in ahead] if value in made else []
    hint = "a router whose logits are a product with a weight"
    raise PassError(f"no weight makes the logits of the router %{router.id}", str(router.origin), hint)


def _layer(name: str) -> str:
    """The router of a state: without what is its own name."""
    return name.rpartition(".")[0]
