"""Dead code, within functions and across calls."""

from __future__ import annotations

from dataclasses import replace

import torch

from mgraph.ir.graph import Module, State, StateKind, Static
from mgraph.ir.verifier import verify
from mgraph.passes.base import Report
from mgraph.passes.dce import DeadCode
from mgraph.passes.outline import Outline
from tests.passes.build import B, assert_same_results, f32, module_of, random_state, stacked, started


def _layers() -> Module:
    """`forward` calls `layer` twice; of three results, one is read once, one never; a param and a slot are unread."""
    layer = started("layer")
    x, spare = layer.param("x", f32(B, 4)), layer.param("spare", f32(B, 4))
    weight = layer.slot("weight", f32(4, 4))
    only_unread = layer.slot("unread.weight", f32(4, 4))
    layer.statics = ("low", "high")
    clamp = "aten.clamp.default"
    linear = layer.one("aten.linear.default", x, weight)
    (y,) = layer.emit(clamp, [linear], {"min": Static("low")}, types=[f32(B, 4)])
    side = layer.one("aten.neg.default", y)
    linear = layer.one("aten.linear.default", spare, only_unread)
    (unread,) = layer.emit(clamp, [linear], {"max": Static("high")}, types=[f32(B, 4)])
    state = {name: State.make(name, f32(4, 4), StateKind.PARAM) for name in ("a", "b")}
    main = started()
    h = main.param("x", f32(B, 4))
    costly = main.one("aten.exp.default", h)
    sides = []
    for _ in range(2):
        h, s, _unread = main.emit(
            "call",
            [h, costly, state["a"].value, state["b"].value],
            {"callee": "layer", "static.low": 0.5, "static.high": 9.0},
            types=[f32(B, 4)] * 3,
            names=["y", "side", "unread"],
        )
        sides.append(s)
    unused = started("unused")
    return module_of(
        main.build([h, sides[0]]),
        layer.build([y, side, unread]),
        unused.build([unused.param("x", f32(B))]),
        state=state,
    )


def test_calls_shrink_together() -> None:
    module, report = _layers(), Report()
    after = DeadCode().run(module, report)
    forward, layer = after.functions["forward"], after.functions["layer"]
    assert [n.op for n in forward.nodes] == ["call", "call"]  # the argument that nothing reads is not computed
    assert [[v.name for v in n.operands] for n in forward.nodes] == [["x", "a"], ["y", "a"]]
    assert [[v.name for v in n.results] for n in forward.nodes] == [["y", "side"], ["y_1", "side_1"]]
    assert [v.name for v in layer.inputs()] == ["x", "weight"] and len(layer.results) == 2
    assert layer.statics == ("low",)
    assert "unused" not in after.functions
    assert report.counts["removed functions"] == 1
    assert_same_results(module, after, {"x": torch.randn(3, 4)}, random_state(module))


def test_calls_stay_valid() -> None:
    after = DeadCode().run(_layers(), Report())
    assert all("static.high" not in n.attrs for n in after.functions["forward"].nodes)
    verify(after)


def test_a_function_that_only_dead_calls_use_goes() -> None:
    module = _layers()
    forward = module.functions["forward"]
    module = module.with_function(replace(forward, results=(forward.params[0],)))
    module = replace(module, entries={"forward": replace(module.entries["forward"], outputs=("x",))})
    after = DeadCode().run(module, Report())
    assert list(after.functions) == ["forward"] and after.functions["forward"].nodes == ()


def test_parameters_of_entries_stay() -> None:
    builder = started()
    x, _ = builder.param("x", f32(B)), builder.param("unread", f32(B))
    module = module_of(builder.build([builder.one("aten.neg.default", x)]))
    assert DeadCode().run(module, Report()) is module


def test_nothing_dead_nothing_changed() -> None:
    module = Outline().run(stacked(3), Report())
    report = Report()
    assert DeadCode().run(module, report) is module and report.counts == {}
    assert DeadCode().run(replace(module, entries={}), Report()).functions == module.functions
