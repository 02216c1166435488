"""raise-glu: each activation, and each guard broken once."""

from __future__ import annotations

import pytest

from mgraph.passes.raise_glu import RaiseGlu
from tests.passes.raising import assert_same, near_misses, ops, raised

SILU = """
func @f(%gate: f32[B, 6], %up: f32[B, 6]) {
  %a: f32[B, 6] = aten.silu.default(%gate)
  %y: f32[B, 6] = aten.mul.Tensor(%a, %up)
  return %y
}
"""
SIGMOID = """
func @f(%gate: bf16[B, 6], %up: bf16[B, 6]) {
  %a: bf16[B, 6] = aten.sigmoid.default(%gate)
  %b: bf16[B, 6] = aten.mul.Tensor(%gate, %a)
  %y: bf16[B, 6] = aten.mul.Tensor(%up, %b)
  return %y
}
"""
GELU = SILU.replace("silu", "gelu")
TANH = GELU.replace("(%gate)", '(%gate) {approximate = "tanh"}')


@pytest.mark.parametrize(("text", "act"), [(SILU, "silu"), (SIGMOID, "silu"), (GELU, "gelu_erf"), (TANH, "gelu_tanh")])
def test_raises(text: str, act: str) -> None:
    before, after, report = raised(RaiseGlu(), text)
    assert ops(after.functions["f"]) == {"glu": 1}
    (node,) = after.functions["f"].nodes
    assert node.attrs == {"act": act}
    assert [v.name for v in node.operands] == ["gate", "up"]
    assert report.near_misses == []
    assert_same(before, after)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("return %y", "return %y, %a", "`silu` has 2 users, expected 1"),
        ("%up: f32[B, 6]", "%up: f32[6]", "gate f32[B, 6], up f32[6] and result f32[B, 6] differ in shape or dtype"),
        ("%up: f32", "%up: bf16", "gate f32[B, 6], up bf16[B, 6] and result f32[B, 6] differ in shape or dtype"),
    ],
)
def test_near_misses(old: str, new: str, expected: str) -> None:
    assert near_misses(RaiseGlu(), SILU.replace(old, new)) == [f"glu: {expected}"]


CLAMPED = """
func @f(%gate: f32[B, S], %up: f32[B, S]) {
  %a: f32[B, S] = aten.clamp.default(%gate) {max = 0.5}
  %b: f32[B, S] = aten.clamp.default(%up) {max = 0.5, min = -0.5}
  %c: f32[B, S] = aten.mul.Tensor(%a) {other = 1.702}
  %d: f32[B, S] = aten.sigmoid.default(%c)
  %e: f32[B, S] = aten.mul.Tensor(%a, %d)
  %g: f32[B, S] = aten.add.Tensor(%b) {other = 1}
  %y: f32[B, S] = aten.mul.Tensor(%g, %e)
  return %y
}
"""
"""The gated unit of gpt-oss."""


def test_raises_the_quick_form_with_limit_and_offset() -> None:
    before, after, report = raised(RaiseGlu(), CLAMPED)
    (node,) = after.functions["f"].nodes
    assert node.attrs == {"act": "quick_gelu", "alpha": 1.702, "limit": 0.5, "offset": 1.0}
    assert report.near_misses == []
    assert_same(before, after)


def test_unequal_limits_stay_outside() -> None:
    before, after, _ = raised(RaiseGlu(), CLAMPED.replace("max = 0.5, min = -0.5", "max = 0.5, min = -0.25"))
    (node,) = (n for n in after.functions["f"].nodes if n.op == "glu")
    assert node.attrs == {"act": "quick_gelu", "alpha": 1.702, "offset": 1.0}
    assert_same(before, after)


def test_another_reader_of_the_clamped_gate_leaves_the_clamps_outside() -> None:
    before, after, _ = raised(RaiseGlu(), CLAMPED.replace("return %y", "return %y, %a"))
    (node,) = (n for n in after.functions["f"].nodes if n.op == "glu")
    assert "limit" not in node.attrs
    assert_same(before, after)


SQUARED = """
func @f(%x: f32[B, S]) {
  %a: f32[B, S] = aten.relu.default(%x)
  %y: f32[B, S] = aten.pow.Tensor_Scalar(%a) {exponent = 2}
  return %y
}
"""


def test_raises_squared_relu() -> None:
    before, after, _ = raised(RaiseGlu(), SQUARED)
    assert [n.op for n in after.functions["f"].nodes] == ["squared_relu"]
    assert_same(before, after)
    (miss,) = near_misses(RaiseGlu(), SQUARED.replace("return %y", "return %y, %a"))
    assert "`relu` has 2 users, expected 1" in miss
