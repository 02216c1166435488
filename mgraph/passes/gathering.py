"""Rewrites the data functions of a module whose states are sharded over a data axis: gathers and scatters.

Functions below an entry lose the slots of sharded states: a parameter becomes a param, given whole, and the new value
of a gradient accumulator becomes the gradient. The entry does the rest, a *unit* at a time, which is a call with its
states, or the states that the entry itself reads between two calls:

    %w1 = all_gather_start(@layers.1.w, …)        started when the unit before has what it needs
    … = call @layer.fwd(…, %w0, …)
    … = wait(%w1)
    %w2 = all_gather_start(@layers.2.w, …)
    … = call @layer.fwd(…, %w1, …)

Backward the same, and the gradients of a unit are scattered while the next one runs:

    %g2 = reduce_scatter_start(%dw2, …)
    …, %dw1 = call @layer.bwd(…, %w1, …)
    … = accumulate_each(@layers.2.w.grad, …, wait(%g2))
    %g1 = reduce_scatter_start(%dw1, …)

So at most two units are whole at a time, and the gradients of two. The order of events is that of PyTorch FSDP (Zhao
et al. 2023, arXiv:2304.11277).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

from mgraph.ir.builder import FunctionBuilder, rebuild
from mgraph.ir.graph import Function, Module, Node, Phase, Value
from mgraph.ir.types import DType, Partial, PendingType, Shard, TensorType
from mgraph.passes.calls import callee

T = TypeVar("T")

Unit = tuple[str, ...]
"""States that are gathered as one, by name."""


@dataclass(frozen=True)
class Sharded:
    """What is sharded over `axis`, by name of state: parameters, and the accumulators of gradients.

    With `reshard` a layer's parameters are given up after its forward and gathered again for its backward. With `wide`
    gradients narrower than f32 are summed in f32.
    """

    axis: str
    parameters: Mapping[str, Shard]
    gradients: Mapping[str, Shard]
    reshard: bool = True
    wide: bool = False


def with_units(module: Module, entries: Iterable[str], sharded: Sharded, made_by: str) -> tuple[Module, int]:
    """The module with the functions of these entries rewritten, and how many units are gathered in all.

    The types of states stay those of whole tensors; the caller places them.
    """
    callees = _Callees(module, sharded, made_by)
    functions, units = dict(module.functions), 0
    for name in dict.fromkeys(module.entries[entry].function for entry in entries):
        entry = _Entry(callees, module.functions[name])
        functions[name] = entry.rewritten()
        units += len(entry.units)
    return replace(module, functions={**functions, **callees.made}), units


class _Callees:
    """The functions that calls reach, each rewritten once: its slots are of the same kinds in all calls."""

    def __init__(self, module: Module, sharded: Sharded, made_by: str) -> None:
        self.module, self.sharded, self.made_by = module, sharded, made_by
        self.made: dict[str, Function] = {}
        self.gradients: dict[str, dict[int, int]] = {}
        """By function: result that is a gradient → slot of its accumulator."""
        self._kinds: dict[str, tuple[str, ...]] = {}

    def get(self, name: str, kinds: tuple[str, ...]) -> Function:
        """The function as it is where its slots are of these kinds: `parameter`, `gradient`, or empty for any other."""
        if name not in self.made:
            self._kinds[name] = kinds
            body = _Callee(self, self.module.functions[name], kinds)
            self.made[name] = body.rewritten()
            self.gradients[name] = body.gradient_results()
        assert self._kinds[name] == kinds, f"calls of @{name} differ in what is sharded"
        return self.made[name]


class _Body:
    """One function while it is rewritten. Subclasses say where whole parameters come from and gradients go."""

    def __init__(self, callees: _Callees, function: Function) -> None:
        self.callees, self.function, self.sharded = callees, function, callees.sharded
        self.builder: FunctionBuilder = rebuild(function, callees.made_by)
        self.roots: dict[Value, Value] = {}
        """New values of sharded accumulators → the old value, a slot or a state."""

    def kind(self, value: Value) -> str:
        """What a slot or a state is."""
        raise NotImplementedError(type(self).__name__)

    def whole(self, value: Value) -> Value:
        """A parameter, gathered."""
        raise NotImplementedError(type(self).__name__)

    def add(self, total: Value, result: Value, part: Value) -> None:
        """`part` is to be added to the sharded accumulator `total`, which gives `result`."""
        raise NotImplementedError(type(self).__name__)

    def node(self, node: Node) -> None:
        """Rewrite one node."""
        if node.op == "call":
            self._call(node)
        elif node.op == "accumulate" and self.kind(self.root(node.operands[0])) == "gradient":
            self.add(node.operands[0], node.result, self.builder.value(node.operands[1]))
        else:
            operands = tuple(self.whole(v) if self.kind(v) == "parameter" else v for v in node.operands)
            self.builder.keep(node if operands == node.operands else replace(node, operands=operands))

    def root(self, value: Value) -> Value:
        """The accumulator that a value is a new value of; else the value itself."""
        return self.roots.get(value, value)

    def _call(self, node: Node) -> None:
        name = callee(node)
        count = len(self.callees.module.functions[name].params)
        slots = node.operands[count:]
        kinds = tuple(self.kind(self.root(v)) for v in slots)
        body = self.callees.get(name, kinds)
        gathered = [self.whole(v) for v, kind in zip(slots, kinds, strict=True) if kind == "parameter"]
        others = [v for v, kind in zip(slots, kinds, strict=True) if not kind]
        results = list(node.results)
        added: list[tuple[Value, Value, Value]] = []
        for index, slot in self.callees.gradients[name].items():
            results[index] = Value(self.builder.fresh(f"{node.results[index].name}_part"), body.results[index].type)
            added.append((slots[slot], node.results[index], results[index]))
        self.builder.keep(replace(node, operands=(*node.operands[:count], *gathered, *others), results=tuple(results)))
        for total, result, part in added:
            self.add(total, result, part)


class _Callee(_Body):
    """A function below an entry: parameters are params, and gradients are results."""

    def __init__(self, callees: _Callees, function: Function, kinds: Sequence[str]) -> None:
        super().__init__(callees, function)
        self._kinds = dict(zip(function.slots, kinds, strict=True))

    def kind(self, value: Value) -> str:
        return self._kinds.get(value, "")

    def whole(self, value: Value) -> Value:
        return value

    def add(self, total: Value, result: Value, part: Value) -> None:
        self.roots[result] = self.root(total)
        if total in self.roots:
            part = _sum(self.builder, self.builder.value(total), part)
        self.builder.replace(result, part)

    def rewritten(self) -> Function:
        """The function without its sharded slots."""
        for node in self.function.nodes:
            with self.builder.at(node):
                self.node(node)
        slots = self.function.slots
        self.builder.params += [slot for slot in slots if self.kind(slot) == "parameter"]
        self.builder.slots = [slot for slot in slots if not self.kind(slot)]
        return self.builder.build(self.function.results)

    def gradient_results(self) -> dict[int, int]:
        """Results that are gradients → slots of their accumulators."""
        slots = self.function.slots
        results = enumerate(self.function.results)
        return {i: slots.index(self.roots[v]) for i, v in results if v in self.roots}


class _Entry(_Body):
    """The function of an entry: gathers each unit, and scatters the gradients of each."""

    def __init__(self, callees: _Callees, function: Function) -> None:
        super().__init__(callees, function)
        self.units = self._units()
        self._started: list[tuple[Unit, tuple[Value, ...]]] = []
        self._whole: dict[str, Value] = {}
        self._parts: dict[Value, Value] = {}  # accumulators → gradients of the unit at hand
        self._scattered: list[tuple[list[Value], tuple[Value, ...]]] = []  # accumulators, and what is under way
        self._totals: dict[Value, Value] = {}

    def kind(self, value: Value) -> str:
        if not value.is_state:
            return ""
        if value.name in self.sharded.parameters:
            return "parameter"
        return "gradient" if value.name in self.sharded.gradients else ""

    def whole(self, value: Value) -> Value:
        return self._whole[value.name]

    def add(self, total: Value, result: Value, part: Value) -> None:
        root = self.roots[result] = self.root(total)
        before = self._parts.get(root)
        self._parts[root] = part if before is None else _sum(self.builder, before, part)

    # units

    def _units(self) -> dict[int, Unit]:
        """What is gathered before which node."""
        demands: list[tuple[int, bool, Unit]] = []
        for index, node in enumerate(self.function.nodes):
            states = tuple(dict.fromkeys(v.name for v in node.operands if self.kind(v) == "parameter"))
            is_call = node.op == "call"
            if states and not is_call and demands and not demands[-1][1]:
                position, _, before = demands[-1]
                demands[-1] = position, False, tuple(dict.fromkeys((*before, *states)))
            elif states or is_call:
                demands.append((index, is_call, states))
        always = {state for _, is_call, states in demands if not is_call for state in states}
        whole: set[str] = set()  # states that are whole from here on
        units: dict[int, Unit] = {}
        for place, (index, is_call, states) in enumerate(demands):
            wanted = tuple(s for s in states if s not in whole)
            whole.update(states)
            if is_call and self.sharded.reshard:
                # What the next call needs stays: the last layer's backward follows its forward.
                following = next((s for _, other, s in demands[place + 1 :] if other and s), ())
                whole.difference_update(set(states) - set(following) - always)
            if wanted:
                units[index] = wanted
        return units

    def rewritten(self) -> Function:
        """The function with its collectives."""
        order = list(self.units)
        ahead = dict(pairwise(order))
        for index, node in enumerate(self.function.nodes):
            with self.builder.at(node):
                if index in self.units:
                    if not self._started:
                        self._start(self.units[index])
                    self._finish()
                    if index in ahead:
                        self._start(self.units[ahead[index]])
                if node.op == "call":
                    self._scatter()
                self.node(node)
                if node.op == "call":
                    self._scatter()
        with self.builder.at(self.function.nodes[-1], Phase.BACKWARD):
            self._scatter()
            self._add_up()
        results = [self._totals.get(self.root(v), v) if v in self.roots else v for v in self.function.results]
        return self.builder.build(results)

    def _start(self, unit: Unit) -> None:
        """Begin to gather a unit: one node for each dim that states are sharded along."""
        axis = self.sharded.axis
        for dim, names in by_dim(unit, lambda name: self.sharded.parameters[name]).items():
            states = [self.callees.module.state[name].value for name in names]
            types = [PendingType(v.tensor.place(axis, None)) for v in states]
            labels = [f"{_short(name)}_pending" for name in names]
            attrs = {"axis": axis, "dim": dim}
            made = self.builder.emit("all_gather_start", states, attrs, types=types, names=labels)
            self._started.append((tuple(names), made))

    def _finish(self) -> None:
        """Have what was started whole."""
        for names, pending in self._started:
            labels = [f"{_short(name)}_whole" for name in names]
            made = self.builder.emit("wait", pending, names=labels)
            self._whole.update(zip(names, made, strict=True))
        self._started = []

    # gradients

    def _scatter(self) -> None:
        """Begin to scatter the gradients of the unit at hand, after those of the one before are added up."""
        if not self._parts:
            return
        self._add_up()
        axis = self.sharded.axis
        for dim, pairs in by_dim(self._parts.items(), lambda pair: self.sharded.gradients[pair[0].name]).items():
            gradients = [self._term(part) for _, part in pairs]
            attrs: dict[str, object] = {"axis": axis, "dim": dim}
            if self.sharded.wide:
                attrs["wide"] = True
            types = [PendingType(scattered_type(part.tensor, axis, dim, wide=self.sharded.wide)) for part in gradients]
            labels = [f"{_short(total.name)}_pending" for total, _ in pairs]
            made = self.builder.emit("reduce_scatter_start", gradients, attrs, types=types, names=labels)
            self._scattered.append(([total for total, _ in pairs], made))
        self._parts = {}

    def _term(self, part: Value) -> Value:
        """A gradient as a term of the sum over the ranks: one that no batch is in is the same on each, and counts for
        each."""
        if isinstance(part.tensor.on(self.sharded.axis), Partial):
            return part
        type_ = part.tensor.place(self.sharded.axis, Partial("sum"))
        return self.builder.emit("aten.clone.default", (part,), types=[type_], names=["term"])[0]

    def _add_up(self) -> None:
        """Add what was scattered to the accumulators."""
        for totals, pending in self._scattered:
            labels = [f"{_short(total.name)}_part" for total in totals]
            parts = self.builder.emit("wait", pending, names=labels)
            held = [self._totals.get(total, total) for total in totals]
            labels = [f"new_{_short(total.name)}" for total in totals]
            types = [v.type for v in held]
            sums = self.builder.emit("accumulate_each", (*held, *parts), types=types, names=labels)
            self._totals.update(zip(totals, sums, strict=True))
        self._scattered = []


def _sum(builder: FunctionBuilder, left: Value, right: Value) -> Value:
    return builder.emit("aten.add.Tensor", (left, right), types=[left.type], names=["gradient"])[0]


def scattered_type(type_: TensorType, axis: str, dim: int, *, wide: bool) -> TensorType:
    """What scattering a sum gives: f32 where it is `wide` and its terms are narrower."""
    placed = type_.place(axis, Shard(dim))
    return placed.with_dtype(DType.F32) if wide and placed.dtype.bits < DType.F32.bits else placed


def by_dim(items: Iterable[T], placement: Callable[[T], Shard]) -> dict[int, list[T]]:
    """Items by the dim that their placement names: a collective works along one."""
    found: dict[int, list[T]] = {}
    for item in items:
        found.setdefault(placement(item).dim, []).append(item)
    return found


def _short(name: str) -> str:
    return name.replace(".", "_")
