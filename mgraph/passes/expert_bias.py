"""expert-bias: routers whose choice has a bias count how often each expert is chosen; `finish` moves the bias by it.

Before (the bias is a buffer that the router only reads):

    func @layer.fwd(%x; …, %bias) { … %weights, %indices = moe_route(%logits, %bias) … }
    func @microbatch(…) { … = call @layer.fwd(…; …, @layers.0.bias) … }

After (state `layers.0.bias.load: i64[E]`, which data-parallel sums over the ranks):

    func @layer.fwd(%x; …, %bias, %load) { … %counts = expert_counts(%indices)  %new_load = accumulate(%load, %counts) }
    entry microbatch … updates (…, layers.0.bias.load)
    func @finish(%lr) { … = expert_bias_update(@layers.0.bias, @layers.0.bias.load, %finite) {rate = 0.001} … }

Where experts have a capacity, what they drop is not counted. Only forward nodes count, so recomputation counts nothing
twice; evaluation has functions of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from mgraph.errors import PassError
from mgraph.ir.builder import FunctionBuilder, rebuild
from mgraph.ir.graph import Function, Module, Node, Phase, State, StateKind, Value
from mgraph.ir.types import DType, TensorType
from mgraph.passes.base import Pass, Report, Stage, Tier
from mgraph.passes.calls import callee

_LOAD = ".load"


def load_states(state: Mapping[str, State]) -> list[State]:
    """The counts of choices of a module, in declaration order."""
    return [
        s for n, s in state.items() if s.kind is StateKind.SCALAR and n.endswith(_LOAD) and n[: -len(_LOAD)] in state
    ]


@dataclass(frozen=True)
class ExpertBias(Pass):
    """Move the biases of routers after each step by `rate` times the sign of (mean load - load)."""

    rate: float = 0.001

    name: ClassVar[str] = "expert-bias"
    stage: ClassVar[Stage] = Stage.DERIVE
    tier: ClassVar[Tier] = Tier.BITWISE
    requires: ClassVar[frozenset[str]] = frozenset({"microbatch", "finish"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"data-parallel"})

    def run(self, module: Module, report: Report) -> Module:
        """Count in `microbatch`, update in `finish`."""
        counting = _Counting(module, self.name, report)
        entry = module.entries["microbatch"]
        function, loads = counting.function(module.entry_function("microbatch"))
        if not loads:
            hint = (
                "a router with a buffer that is added to its scores; mgraph explain PKG moe_route says what was raised"
            )
            raise PassError("no router has a bias that its load could move", "--expert-bias-rate", hint)
        state = {**module.state, **{load.name: _declared(load) for load in loads.values()}}
        entry = replace(entry, updates=(*entry.updates, *(load.name for load in loads.values())))
        module = replace(module, state=state, entries={**module.entries, entry.name: entry})
        module = replace(module, functions={**module.functions, **counting.done, function.name: function})
        report.count("biases", len(loads))
        return self._update(module, loads)

    def _update(self, module: Module, loads: Mapping[Value, Value]) -> Module:
        finish, entry = module.entry_function("finish"), module.entries["finish"]
        builder = rebuild(finish, self.name)
        builder.phase, builder.origin = Phase.OPTIMIZER, finish.nodes[0].origin
        for node in finish.nodes:
            builder.keep(node)
        (finite,) = (node.result for node in finish.nodes if node.op == "all_finite")
        biases = list(loads)
        names = [f"new_{b.name.replace('.', '_')}" for b in biases]
        states = [module.state[loads[b].name].value for b in biases]
        new = builder.emit("expert_bias_update", (*biases, *states, finite), {"rate": self.rate}, names=names)
        zeros = builder.emit("zero", states, names=[f"zero_{s.name.replace('.', '_')}" for s in states])
        updates = (*entry.updates, *(b.name for b in biases), *(s.name for s in states))
        entries = {**module.entries, "finish": replace(entry, updates=updates)}
        return replace(module, entries=entries).with_function(builder.build((*finish.results, *new, *zeros)))


def _declared(load: Value) -> State:
    return State(load.name, load, StateKind.SCALAR, init=(("zeros_",),), persist=False, seed_name=load.name)


@dataclass
class _Counting:
    """Gives functions the counts of the routers in them, each function once."""

    module: Module
    made_by: str
    report: Report
    done: dict[str, Function] = field(default_factory=dict)
    _loads: dict[str, dict[Value, Value]] = field(default_factory=dict)

    def function(self, function: Function) -> tuple[Function, dict[Value, Value]]:
        """The function, and its biases with the loads that it now takes: states in an entry, else slots, as results."""
        builder = FunctionBuilder(function.name, self.made_by, function.names())
        loads: dict[Value, Value] = {}
        totals: dict[Value, Value] = {}
        kept = {node.operands[1]: node for node in function.nodes if node.op == "moe_capacity"}
        biases: dict[Node, Value] = {}
        for node in function.nodes:
            if node.op == "call" and node.phase is Phase.FORWARD:
                builder.nodes.append(self._called(builder, node, loads, totals))
                continue
            builder.nodes.append(node)
            if node.op == "moe_route" and node.phase is Phase.FORWARD and len(node.operands) == 2:
                # What experts drop is no load of theirs.
                biases[kept.get(node.results[1], node)] = node.operands[1]
            if node in biases:
                bias = biases[node]
                with builder.at(node):
                    counts = builder.one("expert_counts", node.results[1], num_experts=bias.tensor.shape[0])
                    load = self._load(builder, function, bias, node, loads)
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
            load = self._load(builder, None, bias, node, loads)
            operands.append(totals.get(bias, load))
            totals[bias] = Value(builder.fresh("new_load"), load.type)
            results.append(totals[bias])
        return node.with_values(tuple(operands), tuple(results))

    def _load(
        self, builder: FunctionBuilder, function: Function | None, bias: Value, node: Node, loads: dict[Value, Value]
    ) -> Value:
        """The load that belongs to a bias: a state to a state, a slot to a slot."""
        if function is not None and not bias.is_state and bias not in function.slots:
            raise PassError(f"the router's bias {bias!r} is no buffer", str(node.origin), "add a buffer to the scores")
        if bias.is_state and self.module.state[bias.name].kind is not StateKind.BUFFER:
            raise PassError(f"the router's bias {bias.name} is no buffer", str(node.origin), "register it as a buffer")
        if bias not in loads:
            type_ = TensorType(DType.I64, bias.tensor.shape)
            name = f"{bias.name}{_LOAD}"
            loads[bias] = Value(name if bias.is_state else builder.fresh(name), type_, is_state=bias.is_state)
        return loads[bias]
