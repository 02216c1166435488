"""fuse-products: sums of products, and each guard broken once."""

from __future__ import annotations

import pytest
import torch

from mgraph.passes.fuse_products import FuseProducts
from tests.passes.raising import DIMS, assert_same, ops, raised

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


ROUTED = """
func @f(%drows: f32[2*S, 5], %order: i64[2*S], %dlogits: f32[S, 4], %router: f32[4, 5], %q: f32[S, 6], %wq: f32[6, 5]) {
  %r: f32[S, 5] = aten.matmul.default(%dlogits, %router)
  %d: f32[S, 5] = moe_dispatch_grad(%drows, %order) {top_k = 2}
  %dx: f32[S, 5] = aten.add.Tensor(%r, %d)
  %a: f32[S, 5] = aten.matmul.default(%q, %wq)
  %e: f32[S, 5] = aten.add.Tensor(%dx, %a)
  return %e
}
"""


def test_a_product_adds_to_the_gradient_of_a_dispatch() -> None:
    """In either order of the two; further products follow."""
    texts = ROUTED, ROUTED.replace("(%r, %d)", "(%d, %r)")
    for text in texts:
        before, after, report = raised(FuseProducts(), text)
        function = after.functions["f"]
        assert ops(function) == {"moe_dispatch_grad": 1, "matmul_add": 2}
        assert [[v.name for v in node.operands] for node in function.nodes[1:]] == [
            ["d", "dlogits", "router"],
            ["dx", "q", "wq"],
        ]
        assert report.near_misses == [] and len(report.matches) == 2
        assert_same(before, after, order=torch.randperm(2 * DIMS["S"]))


def test_a_product_adds_to_rows_that_came_back() -> None:
    text = ROUTED.replace("%order: i64[2*S]", "%places: i64[S, 2]")
    text = text.replace("moe_dispatch_grad(%drows, %order) {top_k = 2}", "unpack_rows(%drows, %places)")
    before, after, _ = raised(FuseProducts(), text)
    assert ops(after.functions["f"]) == {"unpack_rows": 1, "matmul_add": 2}
    assert_same(before, after, places=torch.stack([torch.randperm(DIMS["S"]) for _ in range(2)], 1))


def test_a_gradient_that_is_read_elsewhere_stays() -> None:
    text = ROUTED.replace("return %e", "return %e, %d")
    before, after, report = raised(FuseProducts(), text)
    assert [miss.detail for miss in report.near_misses] == ["`d` has 2 users, expected 1"]
    assert ops(after.functions["f"]) == ops(before.functions["f"])


EXPERTS = """
func @f(%up: f32[2*S, 5], %gate: f32[2*S, 5], %order: i64[2*S]) {
  %s: f32[2*S, 5] = aten.add.Tensor(%up, %gate)
  %d: f32[S, 5] = moe_dispatch_grad(%s, %order) {top_k = 2}
  return %d
}
"""


def test_the_gradient_of_a_dispatch_takes_both_parts_of_a_sum() -> None:
    before, after, report = raised(FuseProducts(), EXPERTS)
    (node,) = after.functions["f"].nodes
    assert [v.name for v in node.operands] == ["up", "order", "gate"]
    assert report.near_misses == [] and len(report.matches) == 1
    assert_same(before, after, order=torch.randperm(2 * DIMS["S"]))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("return %d", "return %d, %s", "`s` is read elsewhere, too"),
        ("(%up, %gate)", "(%up, %gate) {alpha = 2}", "`s` is no sum of two such rows"),
        ("%gate: f32[2*S, 5]", "%gate: f32[5]", "`s` is no sum of two such rows"),
    ],
)
def test_sums_that_the_gradient_of_a_dispatch_does_not_take(old: str, new: str, expected: str) -> None:
    before, after, report = raised(FuseProducts(), EXPERTS.replace(old, new))
    assert [miss.detail for miss in report.near_misses] == [expected]
    assert ops(after.functions["f"]) == ops(before.functions["f"])
