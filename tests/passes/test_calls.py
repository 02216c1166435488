"""The call structure of a module."""

from __future__ import annotations

from dataclasses import replace

from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.graph import Module
from mgraph.passes.base import Report
from mgraph.passes.calls import callers_first, resolve_argument, roots
from mgraph.passes.outline import Outline
from tests.passes.build import B, f32, module_of, stacked


def test_roots_and_order() -> None:
    module = Outline().run(stacked(2), Report())
    assert roots(module) == ["forward"]
    assert roots(replace(module, entries={})) == ["forward"]
    assert callers_first(module, ["forward"]) == ["forward", "layer"]


def test_parameters_resolve_while_all_calls_agree() -> None:
    module = Outline().run(stacked(3), Report())
    layer, forward = module.functions["layer"], module.functions["forward"]
    carried, shared = layer.params
    assert resolve_argument(module, layer, shared) == (forward, forward.params[1])
    assert resolve_argument(module, layer, carried) == (layer, carried)
    inner = layer.nodes[0].result
    assert resolve_argument(module, layer, inner) == (layer, inner)


def test_parameters_resolve_through_several_levels() -> None:
    def wrapper(name: str, callee: str | None) -> FunctionBuilder:
        builder = FunctionBuilder(name, "capture")
        x = builder.param("x", f32(B))
        if callee is None:
            builder.one("aten.neg.default", x)
        else:
            builder.emit("call", [x], {"callee": callee}, types=[f32(B)], names=["y"])
        return builder

    built = {name: wrapper(name, callee) for name, callee in (("a", "b"), ("b", "c"), ("c", None))}
    functions = [b.build([b.nodes[-1].result]) for b in built.values()]
    module: Module = module_of(*functions)
    a, c = module.functions["a"], module.functions["c"]
    assert resolve_argument(module, c, c.params[0]) == (a, a.params[0])
