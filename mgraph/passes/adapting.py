"""Rewriting functions for lora: an adapter's A and B come as slots through the calls, to where the linear is.

Calls of one function that adapt the same slots in the same way share one variant of it; calls that adapt others have
their own, and calls without adapters keep the function as it is. So layers that a rule leaves out cost nothing, and
one kind of layers stays one function. The layer's number, which keys the dropout, is a static of the call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mgraph.adapters import AdapterRule, adapter_names
from mgraph.ir.builder import FunctionBuilder, rebuild
from mgraph.ir.graph import Function, Module, Node, Static, Value
from mgraph.ir.ops.random import STATES, place, sequences_in
from mgraph.ir.types import DType, TensorType
from mgraph.passes.base import Report
from mgraph.passes.calls import callee


@dataclass(frozen=True, slots=True)
class Form:
    """Which operands of an op are a linear's input and weight, and whether the weight is [in, out]."""

    x: int
    weight: int
    transposed: bool


FORMS = {
    "aten.linear.default": Form(0, 1, False),
    "aten.addmm.default": Form(1, 2, True),
    "aten.mm.default": Form(0, 1, True),
    "aten.matmul.default": Form(0, 1, True),
}
"""The ops that are a linear."""


@dataclass(frozen=True, slots=True)
class Target:
    """The adapter of one weight: its rule, and whether the weight is [in, out]."""

    rule: AdapterRule
    transposed: bool

    def facts(self) -> dict[str, Any]:
        """What the manifest says of the adapter."""
        rule = self.rule
        numbers = {"rank": rule.rank, "alpha": rule.alpha, "dropout": rule.dropout, "rslora": rule.rslora}
        return {**numbers, "scale": rule.scale, "transposed": self.transposed}


@dataclass(frozen=True, slots=True)
class _Bound:
    """An adapter within one function: A and B there, and the place of its dropout (`site` is empty without)."""

    target: Target
    a: Value
    b: Value
    site: str
    call: int | Static

    @property
    def kind(self) -> tuple[Any, ...]:
        """What the nodes of the adapter follow from, its values aside."""
        return self.target.rule.rank, self.target.rule.scale, self.target.rule.dropout, self.site


class Adapting:
    """The functions that a module gets: `functions` has those that are new or changed, by name."""

    def __init__(self, module: Module, targets: Mapping[str, Target], made_by: str, report: Report) -> None:
        self.module, self.targets, self.made_by, self.report = module, targets, made_by, report
        self.functions: dict[str, Function] = {}
        self._variants: dict[Any, Function] = {}
        self._names = set(module.functions)
        self._kept = self._without_adapters()

    def entry(self, function: Function, *, quiet: bool) -> None:
        """Rewrite the function of an entry; a quiet one has no dropout."""
        state = self.module.state
        bound = {}
        for weight, target in self.targets.items():
            a, b = adapter_names(weight)
            site, call = place(a.replace("lora_A.weight", "lora_dropout"))
            if quiet or not target.rule.dropout:
                site, call = "", 0
            bound[state[weight].value] = _Bound(target, state[a].value, state[b].value, site, call)
        numbers = {name: state[name].value for name in STATES if name in state}
        self.functions[function.name] = self._rewrite(rebuild(function, self.made_by), function, bound, numbers)

    def _without_adapters(self) -> set[str]:
        """The functions that some call needs as they are."""
        kept: set[str] = set()
        seen = set()

        def visit(function: Function, adapted: frozenset[Value]) -> None:
            if (function, adapted) in seen:
                return
            seen.add((function, adapted))
            for node in function.nodes:
                if node.op == "call":
                    called = self.module.functions[callee(node)]
                    inner = frozenset(s for s, v in zip(called.inputs(), node.operands, strict=True) if v in adapted)
                    if not inner:
                        kept.add(called.name)
                    visit(called, inner)

        weights = frozenset(self.module.state[name].value for name in self.targets)
        for entry in self.module.entries.values():
            visit(self.module.functions[entry.function], weights)
        return kept

    def _rewrite(
        self, builder: FunctionBuilder, function: Function, bound: Mapping[Value, _Bound], numbers: Mapping[str, Value]
    ) -> Function:
        """The function with the adapters of `bound`; `numbers` are the states that random ops read."""
        for node in function.nodes:
            held = {i: bound[v] for i, v in enumerate(node.operands) if v in bound}
            if node.op == "call" and held:
                self._call(builder, node, held, numbers)
                continue
            builder.keep(node)
            for index, adapter in held.items():
                self._adapt(builder, node, adapter, numbers)
                rule = adapter.target.rule
                detail = f"{node.operands[index].name}: rank {rule.rank}, scale {rule.scale:g}"
                self.report.match(builder.name, node.id, detail)
        return builder.build(function.results)

    def _adapt(self, builder: FunctionBuilder, node: Node, adapter: _Bound, numbers: Mapping[str, Value]) -> None:
        """Add the update to a linear's result."""
        rule, x = adapter.target.rule, builder.value(node.operands[FORMS[node.op].x])
        with builder.at(node):
            if adapter.site:
                attrs = {"p": rule.dropout, "site": adapter.site, "call": adapter.call}
                attrs["samples"] = sequences_in(x.tensor.shape)
                (x,) = builder.emit("dropout", [x, *numbers.values()], attrs)
            low = builder.one("aten.linear.default", x, adapter.a, name="lora")
            low = builder.one("aten.mul.Tensor", low, other=rule.scale)
            update = builder.one("aten.linear.default", low, adapter.b, name="lora")
            adapted = builder.one("aten.add.Tensor", node.result, update)
        builder.replace(node.result, adapted)

    def _call(
        self, builder: FunctionBuilder, node: Node, held: Mapping[int, _Bound], numbers: Mapping[str, Value]
    ) -> None:
        """A call of the variant that has adapters for the operands `held`."""
        calls = list(dict.fromkeys(adapter.call for adapter in held.values() if adapter.site))
        handed = {n: node.operands.index(v) for n, v in numbers.items() if calls and v in node.operands}
        made = self._variant(self.module.functions[callee(node)], held, calls, handed)
        added = [value for adapter in held.values() for value in (adapter.a, adapter.b)]
        added += [v for n, v in numbers.items() if calls and n not in handed]
        statics = dict(zip((f"static.{s}" for s in made.statics[len(made.statics) - len(calls) :]), calls, strict=True))
        attrs = {**node.attrs, "callee": made.name, **statics}
        builder.keep(replace(node, operands=(*node.operands, *added), attrs=attrs))

    def _variant(
        self,
        function: Function,
        held: Mapping[int, _Bound],
        calls: Sequence[int | Static],
        handed: Mapping[str, int],
    ) -> Function:
        """The variant of a function with adapters at its inputs `held`, whose numbers of layers are `calls`."""
        kinds = tuple((i, a.kind, calls.index(a.call) if a.site else 0) for i, a in held.items())
        key = function.name, kinds, tuple(handed.items())
        if key in self._variants:
            return self._variants[key]
        builder = rebuild(function, self.made_by)
        builder.name = self._name(function.name)
        statics = _fresh_statics(function, len(calls))
        builder.statics = (*function.statics, *statics)
        inputs = function.inputs()
        bound = {}
        for index, adapter in held.items():
            names = adapter_names(inputs[index].name)
            a, b = (builder.slot(n, v.type) for n, v in zip(names, (adapter.a, adapter.b), strict=True))
            call = Static(statics[calls.index(adapter.call)]) if adapter.site else 0
            bound[inputs[index]] = replace(adapter, a=a, b=b, call=call)
        wanted = STATES if calls else ()
        numbers = {n: inputs[handed[n]] if n in handed else builder.slot(n, TensorType(DType.I64)) for n in wanted}
        made = self._variants[key] = self._rewrite(builder, function, bound, numbers)
        self.functions[made.name] = made
        return made

    def _name(self, base: str) -> str:
        """The function's own name, unless a call needs it as it is or another variant has it; else a fresh one."""
        if base not in self._kept:
            self._kept.add(base)
            return base
        number = 1
        while f"{base}_{number}" in self._names:
            number += 1
        self._names.add(f"{base}_{number}")
        return f"{base}_{number}"


def _fresh_statics(function: Function, count: int) -> list[str]:
    """So many names for statics that the function does not have."""
    made: list[str] = []
    number = 0
    while len(made) < count:
        name = f"call_{number}" if number else "call"
        made += [name] if name not in function.statics else []
        number += 1
    return made
