"""fuse-products: sums of products, and each guard broken once."""

from __future__ import annotations

import pytest

from mgraph.passes.fuse_products import FuseProducts
from tests.passes.raising import assert_same, ops, raised

TEXT = """
func @f(%q: f32[B, S, 6], %k: f32[B, S, 4], %v: f32[B, S, 2], %wq: f32[6, 5], %wk: f32[4, 5], %wv: f32[2, 5]) {
  %a: f32[B, S, 5] = aten.matmul.default(%q, %wq)
  %b: f32[B, S, 5] = aten.matmul.default(%k, %wk)
  %c: f32[B, S, 5] = aten.add.Tensor(%b, %a)
  %d: f32[B, S, 5] = aten.matmul.default(%v, %wv)
  %e: f32[B, S, 5] = aten.add.Tensor(%c, %d)
  return %e
}
"""


def test_adds_one_after_the_other() -> None:
    before, after, report = raised(FuseProducts(), TEXT)
    function = after.functions["f"]
    assert ops(function) == {"aten.matmul.default": 1, "matmul_add": 2}
    assert [v.name for v in function.nodes[1].operands] == ["a", "k", "wk"]
    assert [v.name for v in function.nodes[2].operands] == ["c", "v", "wv"]
    assert report.near_misses == [] and len(report.matches) == 2
    assert_same(before, after)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("return %e", "return %e, %b", "`b` has 2 users, expected 1"),
        ("return %e", "return %e, %d", "`d` has 2 users, expected 1"),
        ("(%c, %d)", "(%c, %d) {alpha = 2}", "the sum has attributes {'alpha': 2}"),
    ],
)
def test_near_misses(old: str, new: str, expected: str) -> None:
    before, after, report = raised(FuseProducts(), TEXT.replace(old, new))
    assert [miss.detail for miss in report.near_misses] == [expected]
    assert_same(before, after)


def test_other_sums_stay() -> None:
    text = TEXT.replace("aten.matmul.default(%v, %wv)", "aten.neg.default(%c)")
    _, after, report = raised(FuseProducts(), text)
    assert ops(after.functions["f"])["aten.add.Tensor"] == 1 and len(report.matches) == 1
