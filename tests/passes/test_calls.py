"""The call structure of a module."""

from __future__ import annotations

from dataclasses import replace

import torch

from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.graph import Module, Value
from mgraph.ir.verifier import verify
from mgraph.passes.base import Report
from mgraph.passes.calls import callers_first, calls, hand_down, resolve_argument, roots
from mgraph.passes.outline import Outline
from tests.passes.build import B, assert_same_results, f32, module_of, random_state, stacked


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


def test_values_are_handed_down_behind_the_params_and_before_the_slots() -> None:
    module = Outline().run(stacked(3), Report())
    width, scale = len(module.functions["layer"].params), module.functions["forward"].params[1]
    new = Value("more", scale.type)
    after = hand_down(module, {"layer": {new: ("forward", scale)}})
    verify(after)
    assert after.functions["layer"].params == (*module.functions["layer"].params, new)
    assert after.functions["layer"].slots == module.functions["layer"].slots
    assert [node.operands[width] for node in calls(after.functions["forward"])] == [scale] * 3
    inputs = {"x": torch.randn(3, 8), "shared": torch.randn(8)}
    assert_same_results(module, after, inputs, random_state(module))


def test_functions_between_get_a_parameter_of_a_free_name() -> None:
    top = FunctionBuilder("top", "capture")
    taken = [top.param("x", f32(B, 8)), top.param("shared", f32(8))]
    bottom = FunctionBuilder("bottom", "capture")
    bottom.one("aten.neg.default", bottom.param("x", f32(B, 8)))
    middle = FunctionBuilder("middle", "capture")
    x = middle.param("shared", f32(B, 8))
    for _ in range(2):
        (x,) = middle.emit("call", [x], {"callee": "bottom"}, types=[f32(B, 8)], names=["y"])
    top.emit("call", taken[:1], {"callee": "middle"}, types=[f32(B, 8)], names=["y"])
    module = module_of(*(b.build([b.nodes[-1].result]) for b in (top, middle, bottom)))
    new = {Value(name, taken[1].type): ("top", taken[1]) for name in ("first", "second")}
    after = hand_down(module, {"bottom": new})
    assert [p.name for p in after.functions["middle"].params] == ["shared", "shared_1"]
    (between,) = after.functions["middle"].params[1:]
    assert [node.operands for node in calls(after.functions["middle"])] == [
        (node.operands[0], between, between) for node in calls(module.functions["middle"])
    ]
    assert [node.operands for node in calls(after.functions["top"])] == [tuple(taken)]
