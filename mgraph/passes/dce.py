"""Remove what no entry point needs: nodes, functions, and parameters, slots, results and statics of functions.

    func @layer(%x: f32[4], %unused: f32[4]; %w: f32[4]) {        func @layer(%x: f32[4]) {
      %a: f32[4] = aten.neg.default(%x)                             %a: f32[4] = aten.neg.default(%x)
      %b: f32[4] = aten.mul.Tensor(%x, %w)              ==>         return %a
      return %a, %b                                               }
    }

A result goes with all calls at once, where no call's is read; so does an input that the body does not read. Parameters
and results of entry points stay. Random and collective ops are functional and go like any other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from mgraph.ir.graph import Function, Module, Node, Static, Value
from mgraph.passes.base import Pass, Report, Stage
from mgraph.passes.calls import callee, callers_first, calls, roots


@dataclass(frozen=True)
class DeadCode(Pass):
    """Remove dead code, across calls."""

    name: ClassVar[str] = "dce"
    stage: ClassVar[Stage] = Stage.NORMALIZE

    def run(self, module: Module, report: Report) -> Module:
        """Sweep from callers to callees until nothing is left to remove."""
        while True:
            swept = _sweep(module, report)
            if swept is module:
                return module
            module = swept


def _sweep(module: Module, report: Report) -> Module:
    fixed = set(roots(module))
    order = callers_first(module, fixed & set(module.functions))
    functions = dict(module.functions)
    read: dict[str, set[int]] = {name: set() for name in order}  # results that some call's reader needs
    keep: dict[str, _Kept] = {}
    for name in order:
        function = functions[name]
        if name not in fixed and len(read[name]) < len(function.results):
            function = replace(function, results=_pick(function.results, read[name]))
        function = _live(function)
        values = _read_values(function)
        for node in calls(function):
            read[callee(node)].update(i for i, v in enumerate(node.results) if v in values)
        keep[name] = _Kept(
            frozenset(i for i, v in enumerate(function.inputs()) if name in fixed or v in values),
            None if name in fixed else frozenset(read[name]),
            _used_statics(function),
        )
        functions[name] = function
    made = {name: _narrow(functions[name], keep) for name in functions if name in keep}
    before, after = size(module.functions.values()), size(made.values())
    if before == after:
        return module
    for what, old, new in zip(("functions", "nodes", "inputs", "results", "statics"), before, after, strict=True):
        if old != new:
            report.count(f"removed {what}", old - new)
    return replace(module, functions=made)


def size(functions: Collection[Function]) -> tuple[int, int, int, int, int]:
    """How many functions, nodes, inputs, results and statics."""
    return (
        len(functions),
        sum(len(f.nodes) for f in functions),
        sum(len(f.inputs()) for f in functions),
        sum(len(f.results) for f in functions),
        sum(len(f.statics) for f in functions),
    )


def _pick(values: Sequence[Value], positions: Collection[int]) -> tuple[Value, ...]:
    return tuple(v for i, v in enumerate(values) if i in positions)


def _live(function: Function) -> Function:
    """The function without nodes that its results do not need."""
    needed = set(function.results)
    kept: list[Node] = []
    for node in reversed(function.nodes):
        if not needed.isdisjoint(node.results):
            kept.append(node)
            needed.update(node.operands)
    return replace(function, nodes=tuple(reversed(kept))) if len(kept) < len(function.nodes) else function


def _read_values(function: Function) -> set[Value]:
    return {v for node in function.nodes for v in node.operands} | set(function.results)


@dataclass(frozen=True, slots=True)
class _Kept:
    """What of a function's signature stays: positions of inputs and of results (`None`: all), names of statics."""

    inputs: frozenset[int]
    results: frozenset[int] | None
    statics: tuple[str, ...]


def _used_statics(function: Function) -> tuple[str, ...]:
    used = {value.name for node in function.nodes for value in node.attrs.values() if isinstance(value, Static)}
    return tuple(name for name in function.statics if name in used)


def _narrow(function: Function, keep: dict[str, _Kept]) -> Function:
    """The function with its unread inputs and statics removed, and its calls likewise."""
    kept, params = keep[function.name], len(function.params)
    nodes = tuple(_narrow_call(n, keep[callee(n)]) if n.op == "call" else n for n in function.nodes)
    if (nodes, len(kept.inputs), kept.statics) == (function.nodes, len(function.inputs()), function.statics):
        return function
    return replace(
        function,
        params=_pick(function.params, kept.inputs),
        slots=_pick(function.slots, {i - params for i in kept.inputs}),
        nodes=nodes,
        statics=kept.statics,
    )


def _narrow_call(node: Node, kept: _Kept) -> Node:
    operands = _pick(node.operands, kept.inputs)
    results = node.results if kept.results is None else _pick(node.results, kept.results)
    statics = {f"static.{name}" for name in kept.statics}
    attrs = {k: v for k, v in node.attrs.items() if k in statics or not k.startswith("static.")}
    if (len(operands), len(results), len(attrs)) == (len(node.operands), len(node.results), len(node.attrs)):
        return node
    return replace(node, operands=operands, results=results, attrs=attrs)
