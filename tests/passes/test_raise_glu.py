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
