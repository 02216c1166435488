"""Compute equal things once: of two nodes with the same op, operands and attributes the later one goes.

    %a: f32[4] = aten.neg.default(%x)                     %a: f32[4] = aten.neg.default(%x)
    %b: f32[4] = aten.neg.default(%x)              ==>    %c: f32[4] = aten.mul.Tensor(%a, %a)
    %c: f32[4] = aten.mul.Tensor(%a, %b)

Calls merge like other nodes. Random nodes, collectives, and calls of functions that hold either never merge; neither
do nodes of different phases, since recomputing in the backward what the forward computed is on purpose.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from mgraph.ir.builder import rebuild
from mgraph.ir.graph import Function, Module, Node
from mgraph.ir.opdef import op_def
from mgraph.passes.base import Pass, Report, Stage
from mgraph.passes.calls import callee, callers_first, roots
from mgraph.passes.keys import node_key


@dataclass(frozen=True)
class CommonSubexpressions(Pass):
    """Merge equal nodes within each function."""

    name: ClassVar[str] = "cse"
    stage: ClassVar[Stage] = Stage.NORMALIZE

    def run(self, module: Module, report: Report) -> Module:
        """Work from callees to callers, so that it is known which calls may merge."""
        order = callers_first(module, [*roots(module), *module.functions])
        effects: set[str] = set()  # functions that may not be called once instead of twice
        functions = dict(module.functions)
        for name in reversed(order):
            if any(_has_effect(node, effects) for node in functions[name].nodes):
                effects.add(name)
            functions[name] = _merge(functions[name], effects, report)
        changed = any(functions[name] is not f for name, f in module.functions.items())
        return replace(module, functions=functions) if changed else module


def _has_effect(node: Node, effects: set[str]) -> bool:
    if node.op == "call":
        return callee(node) in effects
    declared = op_def(node.op)
    return declared.random or declared.collective


def _merge(function: Function, effects: set[str], report: Report) -> Function:
    builder = rebuild(function, CommonSubexpressions.name)
    first: dict[Any, Node] = {}
    merged = 0
    for node in function.nodes:
        if _has_effect(node, effects):
            builder.keep(node)
            continue
        key = node_key(node, map(builder.value, node.operands))
        equal = first.get(key)
        if equal is not None and [v.type for v in equal.results] == [v.type for v in node.results]:
            for old, new in zip(node.results, equal.results, strict=True):
                builder.replace(old, new)
            report.match(function.name, node.id, f"equals {equal.id}")
            merged += 1
        else:
            first[key] = builder.keep(node)
    return builder.build(function.results) if merged else function
