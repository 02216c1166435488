"""Outlining: what merges, what must not, and that every module computes bitwise the same as before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.graph import Module, Origin, State, StateKind, Static, Value
from mgraph.ir.parser import parse_module
from mgraph.ir.printer import print_module
from mgraph.ir.types import DType, TensorType
from mgraph.ir.verifier import verify
from mgraph.passes.base import Report
from mgraph.passes.outline import Outline
from tests.passes.build import B, assert_same_results, f32, module_of, random_state, stacked


def outlined(module: Module, min_nodes: int = 4) -> Module:
    after = Outline(min_nodes).run(module, Report())
    verify(after)
    return after


def calls_of(module: Module, function: str = "forward") -> list[str]:
    return [str(n.attrs["callee"]) for n in module.functions[function].nodes if n.op == "call"]


def check(module: Module, min_nodes: int = 4) -> Module:
    """Outline, compare values, and give the result."""
    after = outlined(module, min_nodes)
    inputs = {
        p.name: torch.randn([3 if d == B else int(d) for d in p.tensor.shape])
        if p.tensor.dtype.is_float
        else torch.randint(9, [int(d) for d in p.tensor.shape])
        for p in module.functions["forward"].params
    }
    assert_same_results(module, after, inputs, random_state(module))
    return after


@pytest.mark.parametrize("layers", [1, 2, 7])
def test_equal_layers_become_one_function(layers: int) -> None:
    module = stacked(layers)
    after = check(module)
    layer = after.functions["layer"]
    assert calls_of(after) == ["layer"] * layers and len(after.functions) == 2
    assert [p.name for p in layer.params] == (["x", "shared"])
    assert [s.name for s in layer.slots] == ["mlp.up.weight", "mlp.down.weight"]
    assert [n.origin.path for n in layer.nodes] == ["layers.*.norm"] + ["layers.*.mlp"] * 3 + ["layers.*"]
    assert [n.origin.path for n in after.functions["forward"].nodes] == [f"layers.{i}" for i in range(layers)]
    # The values that main keeps are the very same objects.
    assert after.functions["forward"].results == module.functions["forward"].results
    assert print_module(parse_module(print_module(after))) == print_module(after)


def test_numbers_that_differ_become_statics() -> None:
    after = check(stacked(4, windows=(1, 3)))
    layer = after.functions["layer"]
    assert layer.statics == ("max",)
    assert [n.attrs["max"] for n in layer.nodes if "clamp" in n.op] == [Static("max")]
    statics = [n.attrs["static.max"] for n in after.functions["forward"].nodes]
    assert statics == [1.0, 3.0, 1.0, 3.0]


def test_numbers_that_differ_alike_share_a_static() -> None:
    module = stacked(2, windows=(1, 3), repeats=2)
    after = check(module)
    assert after.functions["layer"].statics == ("max",)


def test_small_layers_stay_inline() -> None:
    module = stacked(3)
    assert outlined(module, min_nodes=6) is module
    assert calls_of(outlined(module, min_nodes=5)) == ["layer"] * 3


class Stack:
    """Builds layers of four nodes each, with what a test varies."""

    def __init__(self) -> None:
        self.builder = FunctionBuilder("forward", "capture")
        self.state: dict[str, State] = {}

    def weight(self, name: str) -> Value:
        if name not in self.state:
            self.state[name] = State.make(name, f32(4, 4), StateKind.PARAM)
        return self.state[name].value

    def layer(
        self, path: str, x: Value, scale: Value | None = None, weight: str | None = None, op: str = "relu"
    ) -> Value:
        self.builder.origin = Origin(path, "model.py", 7)
        y = self.builder.one("aten.linear.default", x, self.weight(weight or f"{path}.weight"))
        y = self.builder.one(f"aten.{op}.default", y)
        y = self.builder.one("aten.mul.Tensor", y, scale) if scale else self.builder.one("aten.neg.default", y)
        return self.builder.one("aten.add.Tensor", x, y)

    def plain(self, op: str, *operands: Value) -> Value:
        self.builder.origin = Origin("", "model.py", 1)
        return self.builder.one(op, *operands)

    def module(self, *results: Value) -> Module:
        return module_of(self.builder.build(results), state=self.state)


def test_layers_that_read_different_shared_values_stay_apart() -> None:
    stack = Stack()
    x, masks = stack.builder.param("x", f32(B, 4)), [stack.builder.param(f"m{i}", f32(4)) for i in range(2)]
    for index in range(6):
        x = stack.layer(f"layers.{index}", x, masks[index % 3 == 2])
    after = check(stack.module(x))
    assert calls_of(after) == ["layer", "layer", "layer_1"] * 2
    assert [p.name for p in after.functions["layer_1"].params] == ["x", "m1"]


def test_constants_keep_layers_apart_where_they_are_made_otherwise() -> None:
    stack = Stack()
    x = stack.builder.param("x", f32(B, 4))
    for index, number in enumerate((0.5, 0.5, 2.0)):
        attrs = {"size": (4,), "fill_value": number, "dtype": DType.F32}
        stack.builder.origin = Origin("", "model.py", 1)
        (made,) = stack.builder.emit("aten.full.default", (), attrs)
        x = stack.layer(f"layers.{index}", x, made)
    after = check(stack.module(x))
    assert calls_of(after) == ["layer", "layer", "layer_1"]


def test_masks_of_integer_inputs_keep_layers_apart() -> None:
    """Each is read by one layer; those that are made alike count as one."""
    stack = Stack()
    x, ids = stack.builder.param("x", f32(B, 4)), stack.builder.param("ids", TensorType(DType.I64, (4,)))
    for index, number in enumerate((3, 3, 7)):
        stack.builder.origin = Origin("", "model.py", 1)
        near = stack.builder.one("aten.lt.Scalar", ids, other=number)
        x = stack.layer(f"layers.{index}", x, stack.builder.one("cast", near, dtype=DType.F32))
    after = check(stack.module(x))
    assert calls_of(after) == ["layer", "layer", "layer_1"]


def test_values_of_one_layer_each_are_arguments() -> None:
    stack = Stack()
    x = stack.builder.param("x", f32(B, 4))
    own = [stack.builder.param(f"own{i}", f32(4)) for i in range(3)]
    for index in range(3):
        x = stack.layer(f"layers.{index}", x, own[index])
    after = check(stack.module(x))
    assert calls_of(after) == ["layer"] * 3


def test_the_first_layer_may_read_what_is_read_elsewhere() -> None:
    stack = Stack()
    first = x = stack.builder.param("x", f32(B, 4))
    for index in range(3):
        x = stack.layer(f"layers.{index}", x)
    after = check(stack.module(stack.plain("aten.add.Tensor", x, first)))
    assert calls_of(after) == ["layer"] * 3


def test_shared_state_is_a_slot_under_its_own_name() -> None:
    stack = Stack()
    x = stack.builder.param("x", f32(B, 4))
    for index in range(3):
        x = stack.layer(f"layers.{index}", x, weight="tied.weight")
    after = check(stack.module(x))
    assert calls_of(after) == ["layer"] * 3
    assert [s.name for s in after.functions["layer"].slots] == ["tied.weight"]


def test_kinds_follow_structure() -> None:
    stack = Stack()
    x = stack.builder.param("x", f32(B, 4))
    for index, op in enumerate(["relu", "silu", "silu", "relu"]):
        x = stack.layer(f"model.blocks.{index}", x, op=op)
    after = check(stack.module(x))
    assert calls_of(after) == ["block", "block_1", "block_1", "block"]


def test_a_layer_applied_twice_is_called_twice() -> None:
    stack = Stack()
    x = stack.builder.param("x", f32(B, 4))
    for _ in range(3):
        x = stack.plain("aten.neg.default", stack.layer("layers.0", x))
    after = check(stack.module(x))
    assert calls_of(after) == ["layer"] * 3
    assert {n.operands[1].name for n in after.functions["forward"].nodes if n.op == "call"} == {"layers.0.weight"}


def test_side_outputs_become_results() -> None:
    stack = Stack()
    x = stack.builder.param("x", f32(B, 4))
    side = []
    for index in range(3):
        x = stack.layer(f"layers.{index}", x)
        side.append(stack.builder.nodes[-3].result)
    total = stack.plain("aten.add.Tensor", side[0], side[2])
    after = check(stack.module(x, total))
    # Layer 1 returns it too: the function is one for all.
    assert [len(n.results) for n in after.functions["forward"].nodes if n.op == "call"] == [2, 2, 2]


def test_interleaved_layers() -> None:
    """Two lists whose nodes alternate in the order of the program."""
    stack = Stack()
    x, y = stack.builder.param("x", f32(B, 4)), stack.builder.param("y", f32(B, 4))
    for index in range(3):
        x, y = stack.layer(f"left.{index}", x), stack.layer(f"right.{index}", y)
    nodes = stack.builder.nodes
    stack.builder.nodes = [
        nodes[8 * layer + 4 * side + step] for layer in range(3) for step in range(4) for side in range(2)
    ]
    after = check(stack.module(x, y))
    assert sorted(calls_of(after)) == ["left"] * 3 + ["right"] * 3


def test_layers_that_feed_each_other_in_turns_stay_inline() -> None:
    stack = Stack()
    builder = stack.builder
    x, y = builder.param("x", f32(B, 4)), builder.param("y", f32(B, 4))

    def step(path: str, value: Value) -> Value:
        builder.origin = Origin(path, "model.py", 5)
        return builder.one("aten.relu.default", builder.one("aten.neg.default", value))

    a, b = step("layers.0", x), step("layers.1", y)
    c, d = step("layers.0", b), step("layers.1", a)
    module = stack.module(c, d)
    assert calls_of(check(module)) == []


def test_lists_within_layers() -> None:
    stack = Stack()
    x = stack.builder.param("x", f32(B, 4))
    for index in range(2):
        for expert in range(3):
            x = stack.layer(f"layers.{index}.experts.{expert}", x)
    after = check(stack.module(x))
    assert calls_of(after) == ["layer"] * 2
    assert calls_of(after, "layer") == ["expert"] * 3
    assert [s.name for s in after.functions["layer"].slots] == [f"experts.{i}.weight" for i in range(3)]
    assert [s.name for s in after.functions["expert"].slots] == ["weight"]
    assert after.functions["expert"].nodes[0].origin.path == "layers.*.experts.*"


OPS = ["aten.neg.default", "aten.relu.default", "aten.add.Tensor", "aten.mul.Tensor"]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_graph_keeps_its_meaning(data: Any) -> None:
    """Random graphs, with nodes of random layers in random order."""
    builder = FunctionBuilder("forward", "capture")
    values = [builder.param(f"x{i}", f32(B, 4)) for i in range(2)]
    for _ in range(data.draw(st.integers(4, 24))):
        path = data.draw(st.sampled_from(["", "layers.0", "layers.1", "layers.2.mlp", "other.0", "layers.1.experts.0"]))
        op = data.draw(st.sampled_from(OPS))
        builder.origin = Origin(path, "model.py", 5)
        operands = [data.draw(st.sampled_from(values[-6:])) for _ in range(2 if "Tensor" in op else 1)]
        values.append(builder.one(op, *operands))
    check(
        module_of(builder.build([values[-1], data.draw(st.sampled_from(values))])),
        min_nodes=data.draw(st.integers(1, 4)),
    )


def test_work_grows_with_the_number_of_nodes() -> None:
    """64 layers of 60 nodes: counted, not timed."""
    after = outlined(stacked(64, repeats=12))
    assert len(after.functions["forward"].nodes) == 64 and len(after.functions["layer"].nodes) == 60
