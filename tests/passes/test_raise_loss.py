"""raise-loss: with and without upcast and reshape, and each guard broken once."""

from __future__ import annotations

import pytest
import torch

from mgraph.passes.raise_loss import RaiseLoss
from tests.passes.raising import assert_same, near_misses, ops, raised

PLAIN = """
func @f(%logits: f32[B, 7], %labels: i64[B]) {
  %y: f32[] = aten.cross_entropy_loss.default(%logits, %labels) {reduction = 2}
  return %y
}
"""
UPCAST = """
func @f(%logits: bf16[B, 1, 7], %labels: i64[B]) {
  %a: f32[B, 1, 7] = cast(%logits) {dtype = f32}
  %b: f32[B, 7] = reshape(%a) {shape = [B, 7]}
  %y: f32[] = aten.cross_entropy_loss.default(%b, %labels) {ignore_index = 2, reduction = 2}
  return %y
}
"""


@pytest.mark.parametrize(("text", "ignored", "made"), [(PLAIN, -100, 1), (UPCAST, 2, 2)])
def test_raises(text: str, ignored: int, made: int) -> None:
    before, after, report = raised(RaiseLoss(), text)
    found = ops(after.functions["f"])
    assert found == ({"cross_entropy": 1} if made == 1 else {"reshape": 1, "cross_entropy": 1})
    assert after.functions["f"].nodes[-1].attrs == {"ignore_index": ignored}
    assert report.near_misses == []
    assert_same(before, after, labels=torch.tensor([3, ignored, 6]))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("{reduction = 2}", "{reduction = 1}", "`cross_entropy_loss` has reduction = 1, expected 2 (the sum)"),
        ("= 2}", "= 2, label_smoothing = 0.1}", "`cross_entropy_loss` has label_smoothing = 0.1, expected none"),
        ("f32[", "bf16[", "it is computed in bf16, expected f32"),
    ],
)
def test_near_misses(old: str, new: str, expected: str) -> None:
    assert near_misses(RaiseLoss(), PLAIN.replace(old, new)) == [f"cross_entropy: {expected}"]


def test_near_miss_of_rank() -> None:
    text = PLAIN.replace("f32[B, 7]", "f32[B, 7, S]").replace("i64[B]", "i64[B, S]")
    (miss,) = near_misses(RaiseLoss(), text)
    assert miss == "cross_entropy: the logits are f32[B, 7, S], expected [tokens, vocabulary]"
