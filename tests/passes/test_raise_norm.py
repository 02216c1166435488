"""raise-norm: each way of writing the norm, and each guard broken once."""

from __future__ import annotations

import pytest

from mgraph.passes.raise_norm import RaiseNorm
from tests.passes.raising import assert_same, near_misses, ops, raised

CAST_FIRST = """
func @f(%x: bf16[B, S, 16], %w: bf16[16]) {
  %a: f32[B, S, 16] = cast(%x) {dtype = f32}
  %b: f32[B, S, 16] = aten.pow.Tensor_Scalar(%a) {exponent = 2}
  %c: f32[B, S, 1] = aten.mean.dim(%b) {dim = [-1], keepdim = true}
  %d: f32[B, S, 1] = aten.add.Tensor(%c) {other = 1e-05}
  %e: f32[B, S, 1] = aten.rsqrt.default(%d)
  %g: f32[B, S, 16] = aten.mul.Tensor(%a, %e)
  %h: bf16[B, S, 16] = cast(%g) {dtype = bf16}
  %y: bf16[B, S, 16] = aten.mul.Tensor(%h, %w)
  return %y
}
"""
CAST_LAST = """
func @f(%x: bf16[B, S, 16], %w: bf16[16]) {
  %a: f32[B, S, 16] = cast(%x) {dtype = f32}
  %b: f32[B, S, 16] = aten.pow.Tensor_Scalar(%a) {exponent = 2}
  %c: f32[B, S, 1] = aten.mean.dim(%b) {dim = [2], keepdim = true}
  %d: f32[B, S, 1] = aten.add.Tensor(%c) {other = 1e-06}
  %e: f32[B, S, 1] = aten.rsqrt.default(%d)
  %g: f32[B, S, 16] = aten.mul.Tensor(%e, %a)
  %h: f32[16] = cast(%w) {dtype = f32}
  %i: f32[16] = aten.add.Tensor(%h) {other = 1.0}
  %j: f32[B, S, 16] = aten.mul.Tensor(%g, %i)
  %y: bf16[B, S, 16] = cast(%j) {dtype = bf16}
  return %y
}
"""
ONE_DTYPE = """
func @f(%x: f32[B, 16], %w: f32[16]) {
  %b: f32[B, 16] = aten.mul.Tensor(%x, %x)
  %c: f32[B, 1] = aten.mean.dim(%b) {dim = [-1], keepdim = true}
  %d: f32[B, 1] = aten.add.Tensor(%c) {other = 1e-05}
  %e: f32[B, 1] = aten.rsqrt.default(%d)
  %g: f32[B, 16] = aten.mul.Tensor(%x, %e)
  %y: f32[B, 16] = aten.mul.Tensor(%w, %g)
  return %y
}
"""
TORCH = """
func @f(%x: bf16[B, 16], %w: bf16[16]) {
  %y: bf16[B, 16] = aten.rms_norm.default(%x, %w) {normalized_shape = [16], eps = 1e-05}
  return %y
}
"""


@pytest.mark.parametrize(
    ("text", "eps", "offset", "round_"),
    [
        (CAST_FIRST, 1e-5, 0.0, "normed"),
        (CAST_LAST, 1e-6, 1.0, "product"),
        (ONE_DTYPE, 1e-5, 0.0, "product"),
        (TORCH, 1e-5, 0.0, "product"),
    ],
)
def test_raises(text: str, eps: float, offset: float, round_: str) -> None:
    before, after, report = raised(RaiseNorm(), text)
    function = after.functions["f"]
    assert ops(function) == {"rms_norm": 1}
    (node,) = function.nodes
    assert node.attrs == {"eps": eps, "offset": offset, "round": round_}
    assert node.origin.line == len(before.functions["f"].nodes)
    assert report.counts == {"rms_norm": 1}
    assert_same(before, after)


def test_a_cast_that_others_read_stays() -> None:
    text = CAST_FIRST.replace("return %y", "return %y, %a")
    before, after, _ = raised(RaiseNorm(), text)
    assert ops(after.functions["f"]) == {"cast": 1, "rms_norm": 1}
    assert_same(before, after)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("return %y", "return %y, %e", "`rsqrt` has 2 users, expected 1"),
        ("dim = [-1]", "dim = [1]", "`mean` has dim = (1,), expected the last dim"),
        ("other = 1e-05}", "other = 1e-05, alpha = 2}", "`add` has alpha = 2, expected none"),
        ("exponent = 2", "exponent = 4", "`pow` has exponent = 4, expected 2"),
        ("(%a) {exponent", "(%x) {exponent", "it is computed in bf16, expected f32 or f64"),
        ("%w: bf16[16]", "%w: bf16[S, 16]", "the weight is bf16[S, 16], expected one number for each of the last dim"),
    ],
)
def test_near_misses(old: str, new: str, expected: str) -> None:
    text = CAST_FIRST.replace(old, new)
    if "(%x) {exponent" in text:
        text = text.replace("%b: f32", "%b: bf16").replace("%c: f32", "%c: bf16").replace("%d: f32", "%d: bf16")
        text = text.replace("%e: f32", "%e: bf16")
    (miss,) = near_misses(RaiseNorm(), text)
    assert miss.startswith("rms_norm: ")
    assert expected in miss


def test_near_miss_of_a_default_eps() -> None:
    (miss,) = near_misses(RaiseNorm(), TORCH.replace(", eps = 1e-05", ""))
    assert miss.startswith("rms_norm: `rms_norm` has eps = None, expected a number")


def test_near_miss_of_dtype() -> None:
    text = CAST_FIRST.replace("%w: bf16", "%w: f32").replace("%y: bf16", "%y: f32")
    assert near_misses(RaiseNorm(), text) == ["rms_norm: the result is f32, expected bf16 like x"]


def test_near_miss_names_module_and_line() -> None:
    _, _, report = raised(RaiseNorm(), CAST_FIRST.replace("return %y", "return %y, %e"))
    assert report.near_misses[0].detail == "rms_norm at layers.*.part (model.py:5): `rsqrt` has 2 users, expected 1"
    assert (report.near_misses[0].node, report.near_misses[0].guard) == ("e", "users")


LAYER = """
func @f(%x: bf16[B, S, 16], %w: bf16[16], %b: bf16[16]) {
  %y: bf16[B, S, 16] = aten.layer_norm.default(%x, %w, %b) {normalized_shape = [16], eps = 1e-06}
  return %y
}
"""


@pytest.mark.parametrize(("old", "eps"), [("", 1e-6), (", eps = 1e-06", 1e-5)])
def test_layer_norm(old: str, eps: float) -> None:
    before, after, report = raised(RaiseNorm(), LAYER.replace(old, "") if old else LAYER)
    (node,) = after.functions["f"].nodes
    assert (node.op, node.attrs) == ("layer_norm", {"eps": eps})
    assert report.counts == {"layer_norm": 1}
    assert_same(before, after)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("%b: bf16[16]", "%b: f32[16]", "x, weight and bias have several dtypes: ['bf16', 'f32']"),
        ("(%x, %w, %b)", "(%x, %w)", "expected 3"),
        (
            "%w: bf16[16], %b: bf16[16]",
            "%w: bf16[S, 16], %b: bf16[S, 16]",
            "the weight is bf16[S, 16], expected one number for each of the last dim",
        ),
    ],
)
def test_near_misses_of_layer_norm(old: str, new: str, expected: str) -> None:
    text = LAYER.replace(old, new)
    if "S, 16], %b" in text:
        text = text.replace("[16], eps", "[S, 16], eps")
    (miss,) = near_misses(RaiseNorm(), text)
    assert miss.startswith("layer_norm: ")
    assert expected in miss
