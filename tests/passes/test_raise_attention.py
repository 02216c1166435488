"""raise-attention: fused and written out, masks, repeated heads, and each guard broken once."""

from __future__ import annotations

import pytest

from mgraph.passes.raise_attention import RaiseAttention
from tests.passes.raising import assert_same, near_misses, ops, raised

HEAD = "func @f(%q: f32[B, 4, S, 8], %k: f32[B, 2, S, 8], %v: f32[B, 2, S, 8]) {"
FUSED = f"""
{HEAD}
  %y: f32[B, 4, S, 8] = aten.scaled_dot_product_attention.default(%q, %k, %v) {{enable_gqa = true, is_causal = true}}
  return %y
}}
"""
REPEATED = """
  %ka: f32[B, 2, 1, S, 8] = reshape(%k) {shape = [B, 2, 1, S, 8]}
  %kb: f32[B, 2, 2, S, 8] = aten.expand.default(%ka) {size = [B, 2, 2, S, 8]}
  %kc: f32[B, 4, S, 8] = reshape(%kb) {shape = [B, 4, S, 8]}
  %va: f32[B, 2, 1, S, 8] = reshape(%v) {shape = [B, 2, 1, S, 8]}
  %vb: f32[B, 2, 2, S, 8] = aten.expand.default(%va) {size = [B, 2, 2, S, 8]}
  %vc: f32[B, 4, S, 8] = reshape(%vb) {shape = [B, 4, S, 8]}
"""
MASK = """
  %i: i64[S] = aten.arange.default() {end = S}
  %j: i64[S, 1] = reshape(%i) {shape = [S, 1]}
  %seen: bool[S, S] = aten.le.Tensor(%i, %j)
"""
MASKED = f"""
{HEAD}{REPEATED}{MASK}
  %y: f32[B, 4, S, 8] = aten.scaled_dot_product_attention.default(%q, %kc, %vc, %seen) {{scale = 0.5}}
  return %y
}}
"""
WRITTEN_OUT = f"""
{HEAD}{REPEATED}{MASK}
  %hidden: bool[S, S] = aten.bitwise_not.default(%seen)
  %t: f32[B, 4, 8, S] = aten.permute.default(%kc) {{dims = [0, 1, 3, 2]}}
  %a: f32[B, 4, S, S] = aten.matmul.default(%q, %t)
  %b: f32[B, 4, S, S] = aten.mul.Tensor(%a) {{other = 0.5}}
  %c: f32[B, 4, S, S] = aten.masked_fill.Scalar(%b, %hidden) {{value = -inf}}
  %d: f32[B, 4, S, S] = aten.softmax.int(%c) {{dim = -1}}
  %y: f32[B, 4, S, 8] = aten.matmul.default(%d, %vc)
  return %y
}}
"""


@pytest.mark.parametrize(
    ("text", "scale", "causal"),
    [
        (FUSED, 8**-0.5, True),
        (FUSED.replace("enable_gqa = true, is_causal = true", "enable_gqa = true"), 8**-0.5, False),
        (MASKED, 0.5, True),
        (WRITTEN_OUT, 0.5, True),
        (WRITTEN_OUT.replace("mul.Tensor(%a) {other = 0.5}", "div.Tensor(%a) {other = 4.0}"), 0.25, True),
    ],
)
def test_raises(text: str, scale: float, causal: bool) -> None:
    before, after, report = raised(RaiseAttention(), text)
    (node,) = (n for n in after.functions["f"].nodes if n.op == "attention")
    assert [v.name for v in node.operands] == ["q", "k", "v"]
    assert node.attrs == {"scale": scale, "causal": causal, "window": None}
    assert not {"aten.softmax.int", "aten.expand.default", "aten.matmul.default"} & set(ops(after.functions["f"]))
    assert report.near_misses == []
    assert_same(before, after)


def test_reads_a_window() -> None:
    window = """  %first: i64[S, 1] = aten.sub.Tensor(%j) {other = 3}
  %near: bool[S, S] = aten.gt.Tensor(%i, %first)
  %both: bool[S, S] = aten.bitwise_and.Tensor(%seen, %near)
  %y: """
    text = MASKED.replace("  %y: ", window).replace("%vc, %seen)", "%vc, %both)")
    before, after, _ = raised(RaiseAttention(), text)
    (node,) = (n for n in after.functions["f"].nodes if n.op == "attention")
    assert node.attrs == {"scale": 0.5, "causal": True, "window": 3}
    assert_same(before, after)


@pytest.mark.parametrize(
    ("text", "old", "new", "expected"),
    [
        (FUSED, "is_causal = true", "is_causal = true, dropout_p = 0.1", "has dropout_p = 0.1, expected no dropout"),
        (FUSED, "%v: f32[B, 2", "%v: f32[B, 1", "do not fit"),
        (WRITTEN_OUT, "return %y", "return %y, %d", "`softmax` has 2 users, expected 1"),
        (WRITTEN_OUT, "value = -inf", "value = 0.0", "expected a number that hides a score"),
    ],
)
def test_near_misses(text: str, old: str, new: str, expected: str) -> None:
    assert old in text
    (miss,) = near_misses(RaiseAttention(), text.replace(old, new))
    assert miss.startswith("attention: ")
    assert expected in miss


def test_near_miss_of_a_mask_that_says_more() -> None:
    text = MASKED.replace("f32[B, 2, S, 8]) {", "f32[B, 2, S, 8], %keep: bool[S, S]) {").replace(
        "aten.le.Tensor(%i, %j)", "aten.bitwise_and.Tensor(%keep, %keep)"
    )
    (miss,) = near_misses(RaiseAttention(), text)
    assert miss.startswith("attention: the mask %seen also depends on Ne(keep(")
