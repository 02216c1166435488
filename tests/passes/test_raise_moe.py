"""raise-moe: the router, the sort, grouped products and the weighted sum, and each guard broken once."""

from __future__ import annotations

import pytest

import mgraph.models.capacity
import mgraph.models.grouped  # noqa: F401  (registers the grouped product)
from mgraph.ir.types import DType
from mgraph.passes.raise_moe import RaiseMoe
from tests.passes.raising import assert_same, near_misses, ops, raised

ROUTE = """
func @f(%logits: f32[B, 4]) {
  %a: f32[B, 4] = aten.softmax.int(%logits) {dim = -1}
  %v: f32[B, 2], %i: i64[B, 2] = aten.topk.default(%a) {k = 2}
  %s: f32[B, 1] = aten.sum.dim_IntList(%v) {dim = [-1], keepdim = true}
  %w: f32[B, 2] = aten.div.Tensor(%v, %s)
  return %w, %i
}
"""
AFTER = """
func @f(%logits: bf16[B, 4]) {
  %l: f32[B, 4] = cast(%logits) {dtype = f32}
  %v: f32[B, 2], %i: i64[B, 2] = aten.topk.default(%l) {k = 2, dim = 1}
  %s: f32[B, 2] = aten.softmax.int(%v) {dim = 1}
  %w: bf16[B, 2] = cast(%s) {dtype = bf16}
  return %w, %i
}
"""
PLAIN = ROUTE.replace("%w: f32[B, 2] = aten.div.Tensor(%v, %s)", "%n: f32[B, 1] = aten.neg.default(%s)").replace(
    "return %w, %i", "return %v, %i, %n"
)
EXPERTS = """
func @f(%x: f32[B, 6], %logits: f32[B, 4], %weight: f32[4, 6, 6]) {
  %a: f32[B, 4] = aten.softmax.int(%logits) {dim = -1}
  %v: f32[B, 2], %i: i64[B, 2] = aten.topk.default(%a) {k = 2}
  %b: i64[2*B] = reshape(%i) {shape = [2*B]}
  %e: i64[2*B], %order: i64[2*B] = aten.sort.stable(%b) {stable = true}
  %c: i64[4] = aten.arange.default() {end = 4}
  %offsets: i32[4] = aten.searchsorted.Tensor(%e, %c) {out_int32 = true, right = true}
  %d: i64[2*B] = aten.floor_divide.default(%order) {other = 2}
  %rows: f32[2*B, 6] = aten.index.Tensor(%x, %d) {args = ["self", "indices.0"]}
  %g: f32[2*B, 6] = zoo.grouped_linear.default(%rows, %weight, %offsets)
  %t: f32[4, 6, 6] = aten.permute.default(%weight) {dims = [0, 2, 1]}
  %h: f32[2*B, 6] = zoo.grouped_linear.default(%g, %t, %offsets)
  %p: i64[2*B] = aten.argsort.default(%order)
  %q: f32[2*B, 6] = aten.index.Tensor(%h, %p) {args = ["self", "indices.0"]}
  %r: f32[B, 2, 6] = reshape(%q) {shape = [B, 2, 6]}
  %u: f32[B, 2, 1] = reshape(%v) {shape = [B, 2, 1]}
  %m: f32[B, 2, 6] = aten.mul.Tensor(%r, %u)
  %y: f32[B, 6] = aten.sum.dim_IntList(%m) {dim = [1]}
  return %y
}
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ROUTE, {"score": "softmax", "renormalize": True, "dtype": DType.F32}),
        (PLAIN, {"score": "softmax", "dtype": DType.F32}),
        (AFTER, {"score": "softmax_chosen", "dtype": DType.F32}),  # who weighs by them may take the cast in, too
    ],
)
def test_raises_the_router(text: str, expected: dict[str, object]) -> None:
    before, after, _ = raised(RaiseMoe(), text)
    (node,) = (n for n in after.functions["f"].nodes if n.op == "moe_route")
    assert node.attrs == {"top_k": 2, **expected}
    assert "aten.topk.default" not in ops(after.functions["f"])
    assert_same(before, after)


def test_raises_experts() -> None:
    before, after, report = raised(RaiseMoe(), EXPERTS)
    assert ops(after.functions["f"]) == {"moe_route": 1, "moe_dispatch": 1, "grouped_matmul": 2, "moe_combine": 1}
    transposed = [n.attrs["transpose_w"] for n in after.functions["f"].nodes if n.op == "grouped_matmul"]
    assert transposed == [False, True]
    assert report.near_misses == []
    assert_same(before, after)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("softmax.int(%logits) {dim = -1}", "tanh.default(%logits)", "`topk` reads `tanh`, expected"),
        (
            "softmax.int(%logits) {dim = -1}",
            "softmax.int(%logits) {dim = 0}",
            "`softmax` has dim = 0, expected the last",
        ),
        ("{k = 2}", "{k = 2, largest = false}", "`topk` has largest = False, expected none"),
        ("f32[", "bf16[", "the softmax is computed in bf16, expected f32"),
    ],
)
def test_near_misses_of_the_router(old: str, new: str, expected: str) -> None:
    assert old in ROUTE
    (miss,) = near_misses(RaiseMoe(), ROUTE.replace(old, new))
    assert miss.startswith("moe_route: ")
    assert expected in miss


@pytest.mark.parametrize(
    ("old", "new", "rule", "expected"),
    [
        ("{stable = true}", "{stable = false}", "moe_dispatch", "has stable = False, expected a stable sort"),
        ("{other = 2}", "{other = 3}", "moe_dispatch", "the order is divided by 3, expected 2"),
        ("return %y", "return %y, %d", "moe_dispatch", "`floor_divide` has 2 users, expected 1"),
        ("return %y", "return %y, %m", "moe_combine", "`mul` has 2 users, expected 1"),
    ],
)
def test_near_misses_of_experts(old: str, new: str, rule: str, expected: str) -> None:
    assert old in EXPERTS
    before, after, report = raised(RaiseMoe(), EXPERTS.replace(old, new))
    assert rule not in ops(after.functions["f"])
    (detail,) = (m.detail for m in report.near_misses if m.pattern == rule)
    assert expected in detail
    assert "moe_route" in ops(after.functions["f"]), "the rest is raised all the same"
    if expected.startswith("`"):
        assert_same(before, after)


GROUPS = """
func @f(%logits: f32[B, 8], %bias: f32[8]) {
  %s: f32[B, 8] = aten.sigmoid.default(%logits)
  %a: f32[B, 8] = aten.add.Tensor(%s, %bias)
  %g: f32[B, 4, 2] = reshape(%a) {shape = [B, 4, 2]}
  %h: f32[B, 4, 2], %hi: i64[B, 4, 2] = aten.topk.default(%g) {k = 2}
  %q: f32[B, 4] = aten.sum.dim_IntList(%h) {dim = [-1]}
  %qv: f32[B, 2], %qi: i64[B, 2] = aten.topk.default(%q) {k = 2, sorted = false}
  %z: f32[B, 4] = aten.full.default() {dtype = f32, fill_value = 0.0, size = [B, 4]}
  %m: f32[B, 4] = aten.scatter.value(%z, %qi) {dim = 1, value = 1}
  %n: f32[B, 4, 1] = reshape(%m) {shape = [B, 4, 1]}
  %o: f32[B, 4, 2] = aten.expand.default(%n) {size = [B, 4, 2]}
  %p: f32[B, 8] = reshape(%o) {shape = [B, 8]}
  %r: bool[B, 8] = cast(%p) {dtype = bool}
  %u: bool[B, 8] = aten.bitwise_not.default(%r)
  %c: f32[B, 8] = aten.masked_fill.Scalar(%a, %u) {value = -inf}
  %cv: f32[B, 3], %i: i64[B, 3] = aten.topk.default(%c) {k = 3, sorted = false}
  %v: f32[B, 3] = aten.gather.default(%s, %i) {dim = 1}
  %t: f32[B, 1] = aten.sum.dim_IntList(%v) {dim = [-1], keepdim = true}
  %e: f32[B, 1] = aten.add.Tensor(%t) {other = 1e-20}
  %d: f32[B, 3] = aten.div.Tensor(%v, %e)
  %w: f32[B, 3] = aten.mul.Tensor(%d) {other = 2.5}
  return %w
}
"""
"""The router of DeepSeek-V3."""


def test_raises_a_router_of_groups() -> None:
    before, after, report = raised(RaiseMoe(), GROUPS)
    (node,) = after.functions["f"].nodes
    assert (node.op, report.near_misses) == ("moe_route", [])
    expected = {"top_k": 3, "score": "sigmoid", "renormalize": True, "epsilon": 1e-20, "scale": 2.5, "dtype": DType.F32}
    assert node.attrs == {**expected, "groups": 4, "top_groups": 2, "group_best": 2}
    assert_same(before, after)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("value = -inf", "value = 0.0", "`masked_fill` has value = 0.0, expected -inf"),
        ("value = 1}", "value = 2}", "groups are marked by 2.0 in 0.0, expected 1.0 in 0.0"),
        ("return %w", "return %w, %c", "`masked_fill` has 2 users, expected 1"),
        ("%bias: f32[8]", "%bias: f32[1]", "the bias is f32[1], expected one number for each of 8 experts"),
    ],
)
def test_near_misses_of_a_router_of_groups(old: str, new: str, expected: str) -> None:
    assert old in GROUPS
    details = near_misses(RaiseMoe(), GROUPS.replace(old, new))
    assert any(d.startswith("moe_route: ") and expected in d for d in details), details


def _with_bias(bias: str = "f32[4, 6]") -> str:
    lines = '  %k: f32[2*B, 6] = aten.index.Tensor(%bias, %e) {args = ["self", "indices.0"]}\n'
    lines += "  %l: f32[2*B, 6] = aten.add.Tensor(%g, %k)\n"
    text = EXPERTS.replace("%weight: f32[4, 6, 6])", f"%weight: f32[4, 6, 6], %bias: {bias})")
    return text.replace("  %t: f32[4, 6, 6]", lines + "  %t: f32[4, 6, 6]").replace("(%g, %t,", "(%l, %t,")


def test_raises_biases_of_experts() -> None:
    before, after, report = raised(RaiseMoe(), _with_bias())
    assert ops(after.functions["f"]) == {"moe_route": 1, "moe_dispatch": 1, "grouped_matmul": 2, "moe_combine": 1}
    assert [len(n.operands) for n in after.functions["f"].nodes if n.op == "grouped_matmul"] == [4, 3]
    assert report.near_misses == []
    assert_same(before, after)


def test_a_bias_of_another_shape_stays_outside() -> None:
    before, after, _ = raised(RaiseMoe(), _with_bias("f32[5, 6]"))
    assert [len(n.operands) for n in after.functions["f"].nodes if n.op == "grouped_matmul"] == [3, 3]
    assert_same(before, after)


def cleared(text: str) -> str:
    """EXPERTS whose dropped rows are cleared before the first product and after the last."""
    text = text.replace(
        "  %g: f32", "  %open: f32[2*B, 6] = zoo.clear_tail.default(%rows, %offsets)\n  %g: f32"
    ).replace("grouped_linear.default(%rows", "grouped_linear.default(%open")
    return text.replace("  %p: i64", "  %end: f32[2*B, 6] = zoo.clear_tail.default(%h, %offsets)\n  %p: i64").replace(
        "aten.index.Tensor(%h", "aten.index.Tensor(%end"
    )


def test_raises_capacity() -> None:
    """What experts dropped is marked as others', and nothing clears it any more."""
    text = EXPERTS.replace(
        "  %b: i64[2*B] = reshape(%i)",
        "  %kv: f32[B, 2], %ki: i64[B, 2] = zoo.within_capacity.default(%v, %i) "
        '{factor = 0.5, keep = "position", num_experts = 4}\n  %b: i64[2*B] = reshape(%ki)',
    )
    text = text.replace("reshape(%v)", "reshape(%kv)")
    before, after, report = raised(RaiseMoe(), cleared(text))
    expected = {"moe_route": 1, "moe_capacity": 1, "moe_dispatch": 1, "grouped_matmul": 2, "moe_combine": 1}
    assert ops(after.functions["f"]) == expected
    (dispatch,) = (n for n in after.functions["f"].nodes if n.op == "moe_dispatch")
    (combine,) = (n for n in after.functions["f"].nodes if n.op == "moe_combine")
    assert dispatch.attrs["others"] and combine.operands[3] is dispatch.results[2]
    assert report.near_misses == []
    assert_same(before, after)


def test_raises_padding() -> None:
    """What is no token's is dropped by all experts."""
    text = EXPERTS.replace(
        "  %b: i64[2*B] = reshape(%i)",
        "  %best: f32[B] = aten.amax.default(%a) {dim = [1]}\n  %real: bool[B] = aten.gt.Scalar(%best) {other = 0.5}\n"
        "  %kv: f32[B, 2], %ki: i64[B, 2] = zoo.without_padding.default(%v, %i, %real) "
        "{num_experts = 4}\n  %b: i64[2*B] = reshape(%ki)",
    )
    text = text.replace("reshape(%v)", "reshape(%kv)")
    before, after, report = raised(RaiseMoe(), cleared(text))
    expected = {"moe_route": 1, "moe_drop_padding": 1, "moe_dispatch": 1, "grouped_matmul": 2, "moe_combine": 1}
    assert {op: n for op, n in ops(after.functions["f"]).items() if not op.startswith("aten.")} == expected
    (dispatch,) = (n for n in after.functions["f"].nodes if n.op == "moe_dispatch")
    assert dispatch.attrs["others"] and report.near_misses == []
    assert_same(before, after)
