"""Counts that functions make for every microbatch, in states that `finish` reads and sets back.

What is counted in a function that layers share belongs to something of the layer (a weight, a bias): its count is the
state of that name with a suffix, handed through calls beside it as a slot, and given back as a result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.graph import Function, Module, Node, Phase, State, StateKind, Value
from mgraph.ir.types import Type
from mgraph.passes.base import Report
from mgraph.passes.calls import callee

LOAD, OVERRUN = ".load", ".overrun"
"""What the names of counts end with."""


def count_states(state: Mapping[str, State]) -> list[State]:
    """The counts of a module, in declaration order."""
    counts = [(n, s) for n, s in state.items() if s.kind is StateKind.SCALAR]
    return [s for n, s in counts for end in (LOAD, OVERRUN) if n.endswith(end) and n.removesuffix(end) in state]


@dataclass
class Counting:
    """Gives functions the counts of what is in them, each function once. Only forward nodes count, so recomputation
    counts nothing twice."""

    module: Module
    made_by: str
    report: Report
    done: dict[str, Function] = field(default_factory=dict)
    _counts: dict[str, dict[Value, Value]] = field(default_factory=dict)
    _states: dict[str, Value] = field(default_factory=dict)

    suffix: ClassVar[str]

    def counted(self, builder: FunctionBuilder, function: Function, node: Node) -> tuple[Value, Value] | None:
        """What a count of this node belongs to, and the count i64[..], emitted; None where nothing is counted."""
        raise NotImplementedError(type(self).__name__)

    def handed(self, owner: Value, slot: Value, node: Node) -> None:
        """Called for what a call hands over for a slot that counts belong to."""

    def everywhere(self, *entries: str) -> tuple[Module, dict[Value, Value]]:
        """The module whose entries count, and the counts by what they belong to."""
        module, found = self.module, dict[Value, Value]()
        for name in entries:
            function, counts = self.function(self.module.entry_function(name))
            found |= counts
            declared = {count.name: _declared(count) for count in counts.values()}
            entry = replace(module.entries[name], updates=(*module.entries[name].updates, *declared))
            module = replace(
                module,
                state={**module.state, **declared},
                entries={**module.entries, name: entry},
                functions={**module.functions, **self.done, function.name: function},
            )
        return module, found

    def function(self, function: Function) -> tuple[Function, dict[Value, Value]]:
        """The function, and the counts that it now takes by what they belong to: states in an entry, else slots."""
        builder = FunctionBuilder(function.name, self.made_by, function.names())
        counts: dict[Value, Value] = {}
        totals: dict[Value, Value] = {}
        for node in function.nodes:
            if node.phase is not Phase.FORWARD:
                builder.nodes.append(node)
            elif node.op == "call":
                builder.nodes.append(self._called(builder, node, counts, totals))
            else:
                builder.nodes.append(node)
                with builder.at(node):
                    found = self.counted(builder, function, node)
                    if found is not None:
                        owner, count = found
                        before = totals.get(owner, self._count(builder, owner, count.type, counts))
                        totals[owner] = builder.one("accumulate", before, count, name="new_count")
                        self.report.match(function.name, node.id, f"counted for {owner!r} at {node.origin}")
        nodes, slots = tuple(builder.nodes), tuple(v for v in counts.values() if not v.is_state)
        changed = replace(
            function, nodes=nodes, slots=(*function.slots, *slots), results=(*function.results, *totals.values())
        )
        return changed if counts else function, counts

    def _called(
        self, builder: FunctionBuilder, node: Node, counts: dict[Value, Value], totals: dict[Value, Value]
    ) -> Node:
        """A call that hands counts over and takes their new values."""
        name = callee(node)
        if name not in self._counts:
            function, self._counts[name] = self.function(self.module.functions[name])
            if self._counts[name]:
                self.done[name] = function
        inner = self.module.functions[name]
        operands, results = list(node.operands), list(node.results)
        for slot, within in self._counts[name].items():
            owner = node.operands[len(inner.params) + inner.slots.index(slot)]
            self.handed(owner, slot, node)
            count = self._count(builder, owner, within.type, counts)
            operands.append(totals.get(owner, count))
            totals[owner] = Value(builder.fresh("new_count"), count.type)
            results.append(totals[owner])
        return node.with_values(tuple(operands), tuple(results))

    def _count(self, builder: FunctionBuilder, owner: Value, type_: Type, counts: dict[Value, Value]) -> Value:
        """The count of an owner: a state of a state, a slot of a slot."""
        if owner not in counts:
            name = f"{owner.name}{self.suffix}"
            made = Value(name if owner.is_state else builder.fresh(name), type_, is_state=owner.is_state)
            counts[owner] = self._states.setdefault(name, made) if owner.is_state else made
        return counts[owner]


def _declared(count: Value) -> State:
    return State(count.name, count, StateKind.SCALAR, init=(("zeros_",),), persist=False, seed_name=count.name)


def with_counts_told(
    module: Module, builder: FunctionBuilder, output: str, counts: Mapping[Value, Value], more: Sequence[int]
) -> tuple[Value, Sequence[Value], Module]:
    """What `finish` tells of counts, all in one i64[..], their new values, which are 0, and the module whose entry has
    them; `more` goes with each layer. The caller builds the function."""
    entry = module.entries["finish"]
    states = [module.state[count.name].value for count in counts.values()]
    attrs = {"layers": tuple(layer_of(owner.name) for owner in counts), "choices": tuple(more)}
    (told,) = builder.emit("join_loads", states, attrs, names=[output])
    zeros = builder.emit("zero", states, names=[f"zero_{s.name.replace('.', '_')}" for s in states])
    updates = (*entry.updates, *(s.name for s in states))
    entry = replace(entry, outputs=(*entry.outputs, output), updates=updates)
    return told, zeros, replace(module, entries={**module.entries, "finish": entry})


def layer_of(name: str) -> str:
    """The module of a state: its name without what the module itself calls it."""
    return name.rpartition(".")[0]
