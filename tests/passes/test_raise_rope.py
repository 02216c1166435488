"""raise-rope: both ways of writing the rotation, with and without casts, and each guard broken once."""

from __future__ import annotations

import pytest
import torch

from mgraph.ir.interpreter import run
from mgraph.passes.raise_rope import RaiseRope
from tests.passes.raising import assert_same, inputs_of, near_misses, ops, raised

FULL = """
func @f(%x: bf16[B, 2, S, 8], %cos: bf16[1, S, 8], %sin: bf16[1, S, 8]) {
  %a: bf16[B, 2, S, 8] = aten.mul.Tensor(%x, %cos)
  %b: bf16[B, 2, S, 4] = aten.slice.Tensor(%x) {dim = 3, end = 4}
  %c: bf16[B, 2, S, 4] = aten.slice.Tensor(%x) {dim = 3, start = 4}
  %d: bf16[B, 2, S, 4] = aten.neg.default(%c)
  %e: bf16[B, 2, S, 8] = aten.cat.default(%d, %b) {args = ["tensors.0", "tensors.1"], dim = -1}
  %g: bf16[B, 2, S, 8] = aten.mul.Tensor(%e, %sin)
  %y: bf16[B, 2, S, 8] = aten.add.Tensor(%a, %g)
  return %y
}
"""
WIDE = """
func @f(%x: bf16[B, 2, S, 8], %cos: f32[1, S, 8], %sin: f32[1, S, 8]) {
  %w: f32[B, 2, S, 8] = cast(%x) {dtype = f32}
  %a: f32[B, 2, S, 8] = aten.mul.Tensor(%w, %cos)
  %b: f32[B, 2, S, 4] = aten.slice.Tensor(%w) {dim = 3, end = 4}
  %c: f32[B, 2, S, 4] = aten.slice.Tensor(%w) {dim = 3, start = 4}
  %d: f32[B, 2, S, 4] = aten.neg.default(%c)
  %e: f32[B, 2, S, 8] = aten.cat.default(%d, %b) {args = ["tensors.0", "tensors.1"], dim = 3}
  %g: f32[B, 2, S, 8] = aten.mul.Tensor(%sin, %e)
  %h: f32[B, 2, S, 8] = aten.add.Tensor(%g, %a)
  %y: bf16[B, 2, S, 8] = cast(%h) {dtype = bf16}
  return %y
}
"""
HALF = """
func @f(%x: f32[B, 2, S, 8], %cos: f32[1, S, 4], %sin: f32[1, S, 4]) {
  %a: f32[B, 2, S, 4] = aten.slice.Tensor(%x) {dim = 3, end = 4}
  %b: f32[B, 2, S, 4] = aten.slice.Tensor(%x) {dim = 3, start = 4}
  %c: f32[B, 2, S, 4] = aten.mul.Tensor(%a, %cos)
  %d: f32[B, 2, S, 4] = aten.mul.Tensor(%b, %sin)
  %e: f32[B, 2, S, 4] = aten.sub.Tensor(%c, %d)
  %g: f32[B, 2, S, 4] = aten.mul.Tensor(%b, %cos)
  %h: f32[B, 2, S, 4] = aten.mul.Tensor(%a, %sin)
  %i: f32[B, 2, S, 4] = aten.add.Tensor(%g, %h)
  %y: f32[B, 2, S, 8] = aten.cat.default(%e, %i) {args = ["tensors.0", "tensors.1"], dim = -1}
  return %y
}
"""


INTERLEAVED = """
func @f(%x: bf16[B, 2, S, 8], %cos: bf16[1, S, 8], %sin: bf16[1, S, 8]) {
  %w: f32[B, 2, S, 8] = cast(%x) {dtype = f32}
  %a: f32[B, 2, S, 8] = aten.mul.Tensor(%w, %cos)
  %b: f32[B, 2, S, 4] = aten.slice.Tensor(%w) {dim = 3, step = 2}
  %c: f32[B, 2, S, 4] = aten.slice.Tensor(%w) {dim = 3, start = 1, step = 2}
  %d: f32[B, 2, S, 4] = aten.neg.default(%c)
  %e: f32[B, 2, S, 4, 2] = aten.stack.default(%d, %b) {args = ["tensors.0", "tensors.1"], dim = -1}
  %i: f32[B, 2, S, 8] = reshape(%e) {shape = [B, 2, S, 8]}
  %g: f32[B, 2, S, 8] = aten.mul.Tensor(%i, %sin)
  %h: f32[B, 2, S, 8] = aten.add.Tensor(%a, %g)
  %y: bf16[B, 2, S, 8] = cast(%h) {dtype = bf16}
  return %y
}
"""
HALVED = HALF.replace("{dim = 3, end = 4}", "{dim = 3, step = 2}").replace(
    "{dim = 3, start = 4}", "{dim = 3, start = 1, step = 2}"
)
INTERLEAVED_HALF = HALVED.replace(
    '%y: f32[B, 2, S, 8] = aten.cat.default(%e, %i) {args = ["tensors.0", "tensors.1"], dim = -1}',
    '%j: f32[B, 2, S, 4, 2] = aten.stack.default(%e, %i) {args = ["tensors.0", "tensors.1"], dim = 4}\n'
    "  %y: f32[B, 2, S, 8] = reshape(%j) {shape = [B, 2, S, 8]}",
)


@pytest.mark.parametrize("text", [INTERLEAVED, INTERLEAVED_HALF])
def test_raises_interleaved(text: str) -> None:
    before, after, report = raised(RaiseRope(), text)
    (node,) = after.functions["f"].nodes
    assert (node.op, node.attrs["style"]) == ("rope", "interleaved")
    assert report.near_misses == []
    assert_same(before, after)


def test_pairs_that_come_back_as_halves_are_brought_into_order_first() -> None:
    before, after, report = raised(RaiseRope(), HALVED)
    assert ops(after.functions["f"]) == {"reshape": 2, "aten.permute.default": 1, "rope": 1}
    assert report.near_misses == []
    assert_same(before, after)


@pytest.mark.parametrize("text", [FULL, WIDE, HALF])
def test_raises(text: str) -> None:
    before, after, report = raised(RaiseRope(), text)
    assert ops(after.functions["f"]) == {"rope": 1}
    (node,) = after.functions["f"].nodes
    assert [v.name for v in node.operands] == ["x", "cos", "sin"]
    assert report.near_misses == []
    assert_same(before, after)


PARTIAL = """
func @f(%w: f32[B, 2, S, 12], %cos: f32[1, S, 8], %sin: f32[1, S, 8]) {
  %x: f32[B, 2, S, 8] = aten.slice.Tensor(%w) {dim = 3, end = 8}
  %a: f32[B, 2, S, 8] = aten.mul.Tensor(%x, %cos)
  %b: f32[B, 2, S, 4] = aten.slice.Tensor(%w) {dim = 3, end = 4}
  %c: f32[B, 2, S, 4] = aten.slice.Tensor(%w) {dim = 3, start = 4, end = 8}
  %d: f32[B, 2, S, 4] = aten.neg.default(%c)
  %e: f32[B, 2, S, 8] = aten.cat.default(%d, %b) {args = ["tensors.0", "tensors.1"], dim = -1}
  %g: f32[B, 2, S, 8] = aten.mul.Tensor(%e, %sin)
  %y: f32[B, 2, S, 8] = aten.add.Tensor(%a, %g)
  return %y
}
"""
"""The first eight of twelve dims are turned."""
LAST_PART = (
    PARTIAL.replace("{dim = 3, end = 8}", "{dim = 3, start = 4}")
    .replace("{dim = 3, end = 4}", "{dim = 3, start = 4, end = 8}")
    .replace(
        "%c: f32[B, 2, S, 4] = aten.slice.Tensor(%w) {dim = 3, start = 4, end = 8}",
        "%c: f32[B, 2, S, 4] = aten.slice.Tensor(%w) {dim = 3, start = 8}",
    )
)


@pytest.mark.parametrize("text", [PARTIAL, LAST_PART])
def test_raises_a_part_of_the_head(text: str) -> None:
    before, after, report = raised(RaiseRope(), text)
    part, rope = after.functions["f"].nodes
    assert part.op == "aten.slice.Tensor" and rope.operands[0] == part.result
    assert (rope.op, rope.attrs["style"]) == ("rope", "half")
    assert report.near_misses == []
    assert_same(before, after)


@pytest.mark.parametrize(
    ("text", "old", "new", "expected"),
    [
        (PARTIAL, "start = 4, end = 8", "start = 8, end = 12", "expected the halves of (0, 8)"),
        (
            PARTIAL,
            "%b: f32[B, 2, S, 4] = aten.slice.Tensor(%w) {dim = 3, end = 4}",
            "%b: f32[B, 2, S, 4] = aten.slice.Tensor(%w) {dim = 3, start = 1, end = 5}",
            "expected the halves of (0, 8)",
        ),
        (FULL, "return %y", "return %y, %e", "`cat` has 2 users, expected 1"),
        (FULL, "(%c)\n", "(%b)\n", "`slice` has start = None, expected half of the last dim"),
        (INTERLEAVED, "return %y", "return %y, %d", "`neg` has 2 users, expected 1"),
        (INTERLEAVED, "start = 1, step = 2", "start = 2, step = 2", "`slice` has start = 2, expected 1"),
        (INTERLEAVED_HALF, "(%b, %cos)", "(%b, %sin)", "`mul` reads %sin, expected %cos (cos)"),
        (HALF, "(%a, %sin)", "(%a, %cos)", "`mul` reads %cos, expected %sin (sin)"),
        (HALF, "aten.sub.Tensor(%c, %d)", "aten.sub.Tensor(%c, %d) {alpha = 2}", "`sub` has alpha = 2, expected none"),
    ],
)
def test_near_misses(text: str, old: str, new: str, expected: str) -> None:
    assert old in text
    (miss,) = near_misses(RaiseRope(), text.replace(old, new))
    assert miss.startswith("rope: ")
    assert expected in miss


def test_keeps_an_upcast_that_is_not_undone() -> None:
    """Without the cast back, the chain is a rope of the upcast x."""
    text = WIDE.replace("  %y: bf16[B, 2, S, 8] = cast(%h) {dtype = bf16}\n", "").replace("return %y", "return %h")
    before, after, _ = raised(RaiseRope(), text)
    assert ops(after.functions["f"]) == {"cast": 1, "rope": 1}
    assert_same(before, after)


COMPLEX = """
func @f(%x: bf16[B, S, 16], %angles: f32[S, 4]) {
  %one: f32[S, 4] = aten.ones_like.default(%angles)
  %p: c64[S, 4] = aten.polar.default(%one, %angles)
  %cis: c64[1, S, 1, 4] = reshape(%p) {shape = [1, S, 1, 4]}
  %w: f32[B, S, 16] = cast(%x) {dtype = f32}
  %a: f32[B, S, 2, 4, 2] = reshape(%w) {shape = [B, S, 2, 4, 2]}
  %b: c64[B, S, 2, 4] = aten.view_as_complex.default(%a)
  %c: c64[B, S, 2, 4] = aten.mul.Tensor(%b, %cis)
  %d: f32[B, S, 2, 4, 2] = aten.view_as_real.default(%c)
  %e: f32[B, S, 2, 8] = reshape(%d) {shape = [B, S, 2, 8]}
  %y: bf16[B, S, 2, 8] = cast(%e) {dtype = bf16}
  return %y
}
"""


@pytest.mark.parametrize(
    "edits", [[], [("%x: bf16[B, S, 16]", "%x: bf16[B, S, 2, 8]"), ("%w: f32[B, S, 16]", "%w: f32[B, S, 2, 8]")]]
)
def test_raises_complex_numbers(edits: list[tuple[str, str]]) -> None:
    text = COMPLEX
    for old, new in edits:
        text = text.replace(old, new)
    before, after, report = raised(RaiseRope(), text)
    (node,) = (n for n in after.functions["f"].nodes if n.op == "rope")
    assert node.attrs == {"style": "interleaved", "inverse": False}
    assert "aten.view_as_complex.default" not in ops(after.functions["f"])
    assert report.near_misses == []
    inputs = inputs_of(before, {})
    found, expected = (run(m, "forward", inputs, {})[0]["out0"] for m in (after, before))
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-7)
    assert float((found.float() - expected.float()).norm() / expected.float().norm()) < 1e-3


_SEVEN = [
    ("(%b, %cis)", "(%b, %z)"),
    ("  %w:", "  %z: c64[7, 1, S, 1, 4] = aten.expand.default(%cis) {size = [7, 1, S, 1, 4]}\n  %w:"),
    ("{shape = [B, S, 2, 8]}", "{shape = [7, B, S, 2, 8]}"),
    *((f"%{name}[B, S", f"%{name}[7, B, S") for name in ("c: c64", "d: f32", "e: f32", "y: bf16")),
]
_TRANSPOSED = [("[1, S, 1, 4]", "[1, S, 4, 1]"), ("[B, S, 2, 4", "[B, S, 4, 2")]


@pytest.mark.parametrize(
    ("edits", "guard", "expected"),
    [
        ([("return %y", "return %y, %c")], "users", "`mul` has 2 users, expected 1"),
        (_TRANSPOSED, "shape", "the table is c64[1, S, 4, 1], expected a complex number for each pair in the last dim"),
        (_SEVEN, "shape", "turned c64[7, B, S, 2, 4], expected the same shape"),
    ],
)
def test_near_misses_of_complex_numbers(edits: list[tuple[str, str]], guard: str, expected: str) -> None:
    text = COMPLEX
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    before, after, report = raised(RaiseRope(), text)
    (miss,) = report.near_misses
    assert after is before and (miss.pattern, miss.guard) == ("rope", guard)
    assert expected in miss.detail
