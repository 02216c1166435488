"""raise-attention: fused and written out, masks, repeated heads, and each guard broken once."""

from __future__ import annotations

import pytest
import torch

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


def test_keys_that_were_swapped_in_one_permutation() -> None:
    """Heads brought forward and the product's swap in one, as in models without rotation."""
    text = """
func @f(%q: f32[B, 4, S, 8], %rows: f32[B, S, 4, 8], %v: f32[B, 4, S, 8]) {
  %t: f32[B, 4, 8, S] = aten.permute.default(%rows) {dims = [0, 2, 3, 1]}
  %a: f32[B, 4, S, S] = aten.matmul.default(%q, %t)
  %b: f32[B, 4, S, S] = aten.div.Tensor(%a) {other = 2.0}
  %d: f32[B, 4, S, S] = aten.softmax.int(%b) {dim = -1}
  %y: f32[B, 4, S, 8] = aten.matmul.default(%d, %v)
  return %y
}
"""
    before, after, _ = raised(RaiseAttention(), text)
    assert sorted(ops(after.functions["f"])) == ["aten.permute.default", "attention"]
    assert_same(before, after)
    untouched = text.replace("dim = -1", "dim = -2")
    before, after, _ = raised(RaiseAttention(), untouched)
    assert after.functions["f"] is before.functions["f"]


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


CAPPED = WRITTEN_OUT.replace(
    "  %c: f32[B, 4, S, S] = aten.masked_fill.Scalar(%b,",
    """  %b1: f32[B, 4, S, S] = aten.div.Tensor(%b) {other = 1.5}
  %b2: f32[B, 4, S, S] = aten.tanh.default(%b1)
  %b3: f32[B, 4, S, S] = aten.mul.Tensor(%b2) {other = 1.5}
  %c: f32[B, 4, S, S] = aten.masked_fill.Scalar(%b3,""",
)
SINKS = f"""
{HEAD.replace(") {", ", %s: f32[4]) {")}{REPEATED}{MASK}
  %zero: f32[] = aten.full.default() {{dtype = f32, fill_value = 0.0, size = []}}
  %added: f32[S, S] = aten.where.ScalarOther(%seen, %zero) {{other = -3.0e+38}}
  %t: f32[B, 4, 8, S] = aten.permute.default(%kc) {{dims = [0, 1, 3, 2]}}
  %a: f32[B, 4, S, S] = aten.matmul.default(%q, %t)
  %b: f32[B, 4, S, S] = aten.mul.Tensor(%a) {{other = 0.5}}
  %c: f32[B, 4, S, S] = aten.add.Tensor(%b, %added)
  %sa: f32[1, 4, 1, 1] = reshape(%s) {{shape = [1, 4, 1, 1]}}
  %sb: f32[B, 4, S, 1] = aten.expand.default(%sa) {{size = [B, 4, S, 1]}}
  %d: f32[B, 4, S, S+1] = aten.cat.default(%c, %sb) {{args = ["tensors.0", "tensors.1"], dim = -1}}
  %m: f32[B, 4, S, 1], %n: i64[B, 4, S, 1] = aten.max.dim(%d) {{dim = -1, keepdim = true}}
  %e: f32[B, 4, S, S+1] = aten.sub.Tensor(%d, %m)
  %g: f32[B, 4, S, S+1] = aten.softmax.int(%e) {{dim = -1, dtype = f32}}
  %h: f32[B, 4, S, S] = aten.slice.Tensor(%g) {{dim = 3, end = S}}
  %y: f32[B, 4, S, 8] = aten.matmul.default(%h, %vc)
  return %y
}}
"""
UNSHIFTED = SINKS.replace("aten.softmax.int(%e)", "aten.softmax.int(%d)")
FIXED = UNSHIFTED.replace(
    "reshape(%s) {shape = [1, 4, 1, 1]}", "aten.full.default() {dtype = f32, fill_value = 0.5, size = [1, 4, 1, 1]}"
)


def _without(text: str, *names: str) -> str:
    """The text without the lines that make these values."""
    return "\n".join(line for line in text.splitlines() if not line.strip().startswith(tuple(f"%{n}:" for n in names)))


def test_raises_a_softcap() -> None:
    before, after, report = raised(RaiseAttention(), CAPPED)
    (node,) = (n for n in after.functions["f"].nodes if n.op == "attention")
    assert node.attrs == {"scale": 0.5, "causal": True, "window": None, "softcap": 1.5}
    assert report.near_misses == []
    assert_same(before, after)


@pytest.mark.parametrize("text", [SINKS, _without(UNSHIFTED, "m", "e"), _without(FIXED, "m", "e")])
def test_raises_sinks(text: str) -> None:
    before, after, report = raised(RaiseAttention(), text)
    (node,) = (n for n in after.functions["f"].nodes if n.op == "attention")
    assert node.attrs == {"scale": 0.5, "causal": True, "window": None, "extra": ("sinks",)}
    assert node.operands[3].tensor.shape == (4,)
    assert not {"aten.softmax.int", "aten.max.dim", "aten.cat.default"} & set(ops(after.functions["f"]))
    assert report.near_misses == []
    assert_same(before, after)


@pytest.mark.parametrize("text", [CAPPED, SINKS])
def test_raises_weights_in_another_dtype(text: str) -> None:
    """bf16 throughout, but for scores from the mask on."""
    wide = {"added", "zero", "c", "sa", "sb", "d", "m", "e", "g", "h"}
    lines = []
    for line in text.splitlines():
        name = line.strip().removeprefix("%").partition(":")[0]
        if name == "c":
            last = "b3" if "%b3" in line else "b"
            lines.append(f"  %wide: f32[B, 4, S, S] = cast(%{last}) {{dtype = f32}}")
            line = line.replace(f"(%{last},", "(%wide,")
        if name == "sa":
            lines.append("  %sw: f32[4] = cast(%s) {dtype = f32}")
            line = line.replace("(%s)", "(%sw)")
        if name == "y":
            last = "h" if "(%h," in line else "d"
            lines.append(f"  %narrow: bf16[B, 4, S, S] = cast(%{last}) {{dtype = bf16}}")
            line = line.replace(f"(%{last},", "(%narrow,")
        lines.append(line if name in wide else line.replace("f32[", "bf16["))
    before, after, report = raised(RaiseAttention(), "\n".join(lines).replace("%wide: bf16", "%wide: f32"))
    assert ops(after.functions["f"])["attention"] == 1
    assert report.near_misses == []
    assert_same(before, after)


def test_reads_the_callers_mask_through_its_negation() -> None:
    inner = WRITTEN_OUT.replace(MASK, "\n").replace("f32[B, 2, S, 8]) {", "f32[B, 2, S, 8], %seen: bool[S, S]) {")
    outer = f"{HEAD}{MASK}  %y: f32[B, 4, S, 8] = call @g(%q, %k, %v, %seen)\n  return %y\n}}\n"
    _, after, report = raised(RaiseAttention(), outer + inner.replace("@f(", "@g("))
    (node,) = (n for n in after.functions["g"].nodes if n.op == "attention")
    assert node.attrs["causal"] is True
    assert report.near_misses == []


@pytest.mark.parametrize(
    ("text", "old", "new", "expected"),
    [
        (CAPPED, "aten.div.Tensor(%b) {other = 1.5}", "aten.div.Tensor(%b) {other = 2.5}", "are divided by 2.5 before"),
        (CAPPED, "{other = 1.5}", "{other = -1.5}", "scores are capped at -1.5, expected a positive number"),
        (CAPPED, "tanh", "sigmoid", "reads `sigmoid`"),
        (SINKS, "%s: f32[4]", "%s: f32[B, 4, 1, 1]", "expected one of each of 4 heads"),
        (SINKS, "{dim = 3, end = S}", "{dim = 3, start = 1}", "taken from column 1 on, expected all but the last"),
        (SINKS, "(%c, %sb)", "(%sb, %c)", "`cat` reads"),
        (SINKS, "return %y", "return %y, %g", "`softmax` has 2 users, expected 1"),
        (SINKS, "return %y", "return %y, %d", "`cat` has 3 users, expected 2"),
    ],
)
def test_near_misses_of_sinks_and_softcap(text: str, old: str, new: str, expected: str) -> None:
    assert old in text
    text = text.replace(old, new)
    if "%s: f32[B" in text:
        text = text.replace("%sa: f32[1, ", "%sa: f32[B, ").replace("{shape = [1, 4, 1, 1]}", "{shape = [B, 4, 1, 1]}")
    misses = near_misses(RaiseAttention(), text)
    assert any(expected in miss for miss in misses), misses


IDS_HEAD = HEAD.replace(") {", ", %ids: i64[B, S]) {")
SAME = """
  %ids_q: i64[B, 1, S, 1] = reshape(%ids) {shape = [B, 1, S, 1]}
  %ids_k: i64[B, 1, 1, S] = reshape(%ids) {shape = [B, 1, 1, S]}
  %same: bool[B, 1, S, S] = aten.eq.Tensor(%ids_q, %ids_k)
  %both: bool[B, 1, S, S] = aten.bitwise_and.Tensor(%same, %seen)
"""
SEGMENTS = MASKED.replace(HEAD, IDS_HEAD).replace(MASK, MASK + SAME).replace("%vc, %seen)", "%vc, %both)")
SEGMENTS_OUT = (
    WRITTEN_OUT.replace(HEAD, IDS_HEAD)
    .replace(MASK, MASK + SAME)
    .replace(
        "%hidden: bool[S, S] = aten.bitwise_not.default(%seen)",
        "%hidden: bool[B, 1, S, S] = aten.bitwise_not.default(%both)",
    )
)
KEYS_HEAD = HEAD.replace(") {", ", %keep: bool[B, S]) {")
KEEP = """
  %keep_k: bool[B, 1, 1, S] = reshape(%keep) {shape = [B, 1, 1, S]}
  %both: bool[B, 1, S, S] = aten.bitwise_and.Tensor(%keep_k, %seen)
"""
KEYS = MASKED.replace(HEAD, KEYS_HEAD).replace(MASK, MASK + KEEP).replace("%vc, %seen)", "%vc, %both)")
IDS = torch.tensor([[1, 1, 1, 2, 2], [4, 3, 3, 3, 4], [7, 7, 7, 7, 7]])
KEPT = torch.tensor([[1, 1, 0, 1, 1], [0, 0, 1, 1, 0], [0, 0, 0, 0, 0]]).bool()


@pytest.mark.parametrize("text", [SEGMENTS, SEGMENTS_OUT])
def test_raises_segments(text: str) -> None:
    before, after, report = raised(RaiseAttention(), text)
    (node,) = (n for n in after.functions["f"].nodes if n.op == "attention")
    assert node.attrs == {"scale": 0.5, "causal": True, "window": None, "extra": ("segments",)}
    assert [v.name for v in node.operands] == ["q", "k", "v", "ids"]
    assert report.near_misses == []
    assert_same(before, after, ids=IDS)


def test_raises_keys() -> None:
    """Rows that see no key are 0, before and after."""
    before, after, report = raised(RaiseAttention(), KEYS)
    (node,) = (n for n in after.functions["f"].nodes if n.op == "attention")
    assert node.attrs == {"scale": 0.5, "causal": True, "window": None, "extra": ("keys",)}
    assert [v.name for v in node.operands] == ["q", "k", "v", "keep"]
    assert report.near_misses == []
    assert_same(before, after, keep=KEPT)


def test_raises_segments_and_sinks() -> None:
    text = (
        SINKS.replace("%s: f32[4]", "%s: f32[4], %ids: i64[B, S]")
        .replace(MASK, MASK + SAME)
        .replace(
            "%added: f32[S, S] = aten.where.ScalarOther(%seen,",
            "%added: f32[B, 1, S, S] = aten.where.ScalarOther(%both,",
        )
    )
    before, after, report = raised(RaiseAttention(), text)
    (node,) = (n for n in after.functions["f"].nodes if n.op == "attention")
    assert node.attrs["extra"] == ("segments", "sinks")
    assert report.near_misses == []
    assert_same(before, after, ids=IDS)


LAYER = """
func @g(%q: f32[B, 4, S, 8], %k: f32[B, 2, S, 8], %v: f32[B, 2, S, 8], %both: bool[B, 1, S, S], %ids: f32[4]) {
  %x: f32[B, 4, S, 8] = aten.scaled_dot_product_attention.default(%q, %k, %v, %both) {enable_gqa = true}
  %y: f32[B, 4, S, 8] = aten.scaled_dot_product_attention.default(%x, %k, %v, %both) {enable_gqa = true}
  return %y
}
"""
BETWEEN = """
func @h(%q: f32[B, 4, S, 8], %k: f32[B, 2, S, 8], %v: f32[B, 2, S, 8], %both: bool[B, 1, S, S], %z: f32[4]) {
  %u: f32[B, 4, S, 8] = call @g(%q, %k, %v, %both, %z)
  %w: f32[B, 4, S, 8] = call @g(%u, %k, %v, %both, %z)
  return %w
}
"""


def _called(name: str, head: str) -> str:
    """A function that makes the mask and calls another with it."""
    head = head.replace(") {", ", %z: f32[4]) {")
    return f"{head}{MASK}{SAME}  %y: f32[B, 4, S, 8] = call @{name}(%q, %k, %v, %both, %z)\n  return %y\n}}\n"


@pytest.mark.parametrize("text", [_called("g", IDS_HEAD) + LAYER, _called("h", IDS_HEAD) + BETWEEN + LAYER])
def test_segments_are_handed_down_to_where_they_are_read(text: str) -> None:
    """One parameter for all attention of a function, in every function on the way; names that are taken are avoided."""
    before, after, report = raised(RaiseAttention(), text)
    assert report.near_misses == []
    for function in after.functions.values():
        read = [n.operands[3] for n in function.nodes if n.op == "attention"]
        assert len(set(read)) <= 1
        if read:
            assert [p.name for p in function.params] == ["q", "k", "v", "both", "ids", "ids_1"]
            assert read == [function.params[-1]] * 2
    assert sum(n.op == "attention" for _, n in after.walk()) == 2
    assert_same(before, after, ids=IDS)


def test_segments_that_a_layer_has_already_are_not_handed_down_again() -> None:
    inner = LAYER.replace("%ids: f32[4]", "%own: i64[B, S]")
    text = _called("g", IDS_HEAD).replace("%both, %z)", "%both, %ids)") + inner
    before, after, _ = raised(RaiseAttention(), text)
    layer = after.functions["g"]
    assert layer.params == before.functions["g"].params
    assert {n.operands[3] for n in layer.nodes if n.op == "attention"} == {layer.params[4]}
    assert_same(before, after, ids=IDS)


SHORTENED = SEGMENTS.replace("%ids: i64[B, S]", "%long: i64[B, S+1]").replace(
    SAME, "  %ids: i64[B, S] = aten.slice.Tensor(%long) {dim = 1, end = S}\n" + SAME
)
KEYS_OUT = (
    WRITTEN_OUT.replace(HEAD, KEYS_HEAD)
    .replace(MASK, MASK + KEEP)
    .replace(
        "%hidden: bool[S, S] = aten.bitwise_not.default(%seen)",
        "%hidden: bool[B, 1, S, S] = aten.bitwise_not.default(%both)",
    )
)
TWO = SEGMENTS.replace("%ids: i64[B, S]", "%ids: i64[B, S], %other: i64[B, S]").replace(
    "reshape(%ids) {shape = [B, 1, 1, S]}", "reshape(%other) {shape = [B, 1, 1, S]}"
)


@pytest.mark.parametrize(
    ("text", "old", "new", "expected"),
    [
        (SEGMENTS, "aten.eq.Tensor", "aten.le.Tensor", "the mask %both also depends on ids("),
        (SEGMENTS, "i64[B, ", "f32[B, ", "the mask %both also depends on Ne(same("),
        (SEGMENTS, "bitwise_and", "bitwise_or", "the mask %both also depends on"),
        (SHORTENED, "", "", "segments i64[B, S+1] does not fit"),
        (TWO, "", "", "the mask %both also depends on Eq("),
        (
            KEYS,
            "reshape(%keep) {shape = [B, 1, 1, S]}",
            "reshape(%keep) {shape = [B, 1, S, 1]}",
            "depends on Ne(keep(b, q), 0)",
        ),
        (KEYS_OUT, "", "", "the mask %both may hide all keys of a row"),
    ],
)
def test_near_misses_of_segments_and_keys(text: str, old: str, new: str, expected: str) -> None:
    assert old in text
    text = text.replace(old, new)
    if "%keep_k" in text and "[B, 1, S, 1]}" in text:
        text = text.replace("%keep_k: bool[B, 1, 1, S]", "%keep_k: bool[B, 1, S, 1]")
    (miss,) = near_misses(RaiseAttention(), text)
    assert miss.startswith("attention: ")
    assert expected in miss
