"""Every raise pass, one guard broken at a time: dtype, layout, an extra user, shape, an attribute, an operand.

The chains are those of the tests of each pass; `edits` are applied one after the other, the first is what breaks the
guard, the others keep the graph well typed.
"""

from __future__ import annotations

import pytest

import mgraph.models.grouped  # noqa: F401  (registers the grouped product)
from mgraph.passes.raise_attention import RaiseAttention
from mgraph.passes.raise_glu import RaiseGlu
from mgraph.passes.raise_loss import RaiseLoss
from mgraph.passes.raise_moe import RaiseMoe
from mgraph.passes.raise_norm import RaiseNorm
from mgraph.passes.raise_rope import RaiseRope
from mgraph.passes.rewrite import RaisePass
from tests.passes import test_raise_attention as attention
from tests.passes import test_raise_glu as glu
from tests.passes import test_raise_loss as loss
from tests.passes import test_raise_moe as moe
from tests.passes import test_raise_norm as norm
from tests.passes import test_raise_rope as rope
from tests.passes.raising import assert_same, raised

Edit = tuple[str, str]


def _case(kind: str, text: str, edits: list[Edit], pattern: str, guard: str, said: str) -> object:
    return pytest.param(text, edits, pattern, guard, said, id=f"{pattern}-{kind}")


def _check(pass_: RaisePass, text: str, edits: list[Edit], pattern: str, guard: str, said: str) -> None:
    report = raised(pass_, text)[2]
    assert not [m for m in report.near_misses if m.pattern == pattern], "the chain itself fits"
    applied = report.counts[pattern]
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    before, _, report = raised(pass_, text)
    found = [m for m in report.near_misses if m.pattern == pattern]
    assert [m.guard for m in found] == [guard], found
    assert said in found[0].detail and "layers.*.part (model.py:" in found[0].detail, found
    assert report.counts.get(pattern, 0) < applied
    assert found[0].node in {node.id for node in before.functions[found[0].function].nodes}


@pytest.mark.parametrize(
    ("text", "edits", "pattern", "guard", "said"),
    [
        _case(
            "dtype of the arithmetic",
            norm.ONE_DTYPE,
            [("f32[", "bf16[")],
            "rms_norm",
            "dtype",
            "it is computed in bf16, expected f32 or f64",
        ),
        _case(
            "dtype of the result",
            norm.CAST_FIRST,
            [("%w: bf16", "%w: f32"), ("%y: bf16", "%y: f32")],
            "rms_norm",
            "dtype",
            "the result is f32, expected bf16 like x",
        ),
        _case(
            "dtype of the rounding",
            norm.ONE_DTYPE,
            [
                ("(%w, %g)", "(%w, %h)"),
                ("  %y: f32", "  %h: bf16[B, 16] = cast(%g) {dtype = bf16}\n  %y: f32"),
            ],
            "rms_norm",
            "dtype",
            "the normalised value is rounded to bf16, expected f32",
        ),
        _case(
            "layout, another dim",
            norm.CAST_FIRST,
            [
                ("dim = [-1]", "dim = [1]"),
                ("%c: f32[B, S, 1]", "%c: f32[B, 1, 16]"),
                ("%d: f32[B, S, 1]", "%d: f32[B, 1, 16]"),
                ("%e: f32[B, S, 1]", "%e: f32[B, 1, 16]"),
            ],
            "rms_norm",
            "attr",
            "`mean` has dim = (1,), expected the last dim",
        ),
        _case(
            "layout, two dims",
            norm.CAST_FIRST,
            [
                ("dim = [-1]", "dim = [1, 2]"),
                ("%c: f32[B, S, 1]", "%c: f32[B, 1, 1]"),
                ("%d: f32[B, S, 1]", "%d: f32[B, 1, 1]"),
                ("%e: f32[B, S, 1]", "%e: f32[B, 1, 1]"),
            ],
            "rms_norm",
            "attr",
            "`mean` has dim = (1, 2), expected the last dim",
        ),
        *(
            _case(
                f"extra user of {op}",
                norm.CAST_FIRST,
                [("return %y", f"return %y, %{value}")],
                "rms_norm",
                "users",
                f"`{op}` has 2 users, expected 1",
            )
            for op, value in (("pow", "b"), ("mean", "c"), ("add", "d"), ("rsqrt", "e"))
        ),
        _case(
            "extra user of the product",
            norm.ONE_DTYPE,
            [("return %y", "return %y, %g")],
            "rms_norm",
            "users",
            "`mul` has 2 users, expected 1",
        ),
        _case(
            "shape of the weight",
            norm.CAST_FIRST,
            [("%w: bf16[16]", "%w: bf16[1]")],
            "rms_norm",
            "shape",
            "the weight is bf16[1], expected one number for each of the last dim of bf16[B, S, 16]",
        ),
        _case(
            "shape of the weight of torch's op",
            norm.TORCH,
            [("%w: bf16[16]", "%w: bf16[B, 16]"), ("[16], eps", "[B, 16], eps")],
            "rms_norm",
            "shape",
            "the weight is bf16[B, 16], expected one number",
        ),
        _case(
            "no weight",
            norm.TORCH,
            [("%x, %w)", "%x)")],
            "rms_norm",
            "operands",
            "`rms_norm` has 1 operands, expected 2",
        ),
        _case(
            "another exponent",
            norm.CAST_FIRST,
            [("exponent = 2", "exponent = 3")],
            "rms_norm",
            "attr",
            "`pow` has exponent = 3, expected 2",
        ),
        _case(
            "no epsilon",
            norm.ONE_DTYPE,
            [("rsqrt.default(%d)", "rsqrt.default(%c)")],
            "rms_norm",
            "op",
            "`rsqrt` reads `mean`, expected `add`",
        ),
        _case(
            "another value",
            norm.ONE_DTYPE,
            [("%x: f32[B, 16],", "%x: f32[B, 16], %z: f32[B, 16],"), ("(%x, %e)", "(%z, %e)")],
            "rms_norm",
            "operand",
            "reads %x, expected %z (x)",
        ),
        _case(
            "dtype",
            norm.LAYER,
            [("%w: bf16[16]", "%w: f32[16]")],
            "layer_norm",
            "dtype",
            "x, weight and bias have several dtypes: ['bf16', 'f32']",
        ),
        _case(
            "layout, two dims",
            norm.LAYER,
            [("[16], eps", "[S, 16], eps"), ("%w: bf16[16], %b: bf16[16]", "%w: bf16[S, 16], %b: bf16[S, 16]")],
            "layer_norm",
            "shape",
            "the weight is bf16[S, 16], expected one number",
        ),
        _case(
            "no bias", norm.LAYER, [("%x, %w, %b)", "%x, %w)")], "layer_norm", "operands", "has 2 operands, expected 3"
        ),
    ],
)
def test_norm(text: str, edits: list[Edit], pattern: str, guard: str, said: str) -> None:
    _check(RaiseNorm(), text, edits, pattern, guard, said)


@pytest.mark.parametrize(
    ("text", "edits", "pattern", "guard", "said"),
    [
        _case(
            "dtype of the result",
            rope.FULL,
            [
                ("%cos: bf16", "%cos: f32"),
                ("%sin: bf16", "%sin: f32"),
                ("%a: bf16", "%a: f32"),
                ("%g: bf16", "%g: f32"),
                ("%y: bf16", "%y: f32"),
            ],
            "rope",
            "dtype",
            "the result is f32, expected bf16 like x",
        ),
        _case(
            "layout, another dim",
            rope.FULL,
            [
                ("dim = 3, end = 4", "dim = 1, end = 1"),
                ("dim = 3, start = 4", "dim = 1, start = 1"),
                ("dim = -1", "dim = 1"),
                *((f"%{n}: bf16[B, 2, S, 4]", f"%{n}: bf16[B, 1, S, 8]") for n in "bcd"),
            ],
            "rope",
            "attr",
            "`cat` has dim = 1, expected the last dim",
        ),
        _case(
            "extra user",
            rope.HALF,
            [("return %y", "return %y, %e")],
            "rope",
            "users",
            "`sub` has 2 users, expected 1",
        ),
        _case(
            "shape of the tables",
            rope.FULL,
            [("%cos: bf16[1, S, 8]", "%cos: bf16[1, S, 1]")],
            "rope",
            "shape",
            "the tables are bf16[1, S, 1] and bf16[1, S, 8], expected equal shapes with the last dim",
        ),
        _case(
            "shape of the result",
            rope.FULL,
            [
                ("%cos: bf16[1, S, 8], %sin: bf16[1, S, 8]", "%cos: bf16[7, 1, 1, S, 8], %sin: bf16[7, 1, 1, S, 8]"),
                *((f"%{n}: bf16[B, 2, S, 8] = aten", f"%{n}: bf16[7, B, 2, S, 8] = aten") for n in "agy"),
            ],
            "rope",
            "shape",
            "the result is bf16[7, B, 2, S, 8], expected the shape of bf16[B, 2, S, 8]",
        ),
        _case(
            "not half",
            rope.FULL,
            [
                ("start = 4", "start = 2, end = 6"),
            ],
            "rope",
            "attr",
            "`slice` has start = 2, expected half of the last dim",
        ),
    ],
)
def test_rope(text: str, edits: list[Edit], pattern: str, guard: str, said: str) -> None:
    _check(RaiseRope(), text, edits, pattern, guard, said)


@pytest.mark.parametrize(
    ("text", "edits", "pattern", "guard", "said"),
    [
        _case(
            "dtype", glu.GELU, [("%up: f32", "%up: bf16")], "glu", "type", "up bf16[B, 6] and result f32[B, 6] differ"
        ),
        _case(
            "layout, broadcast gate",
            glu.SILU,
            [("%gate: f32[B, 6]", "%gate: f32[6]"), ("%a: f32[B, 6]", "%a: f32[6]")],
            "glu",
            "type",
            "gate f32[6], up f32[B, 6] and result f32[B, 6] differ in shape or dtype",
        ),
        _case(
            "extra user of the sigmoid",
            glu.SIGMOID,
            [("return %y", "return %y, %a")],
            "glu",
            "users",
            "`sigmoid` has 2 users, expected 1",
        ),
        _case("shape", glu.TANH, [("%up: f32[B, 6]", "%up: f32[1]")], "glu", "type", "up f32[1] and result f32[B, 6]"),
        _case(
            "another operand",
            glu.SIGMOID,
            [("%up: bf16[B, 6])", "%up: bf16[B, 6], %z: bf16[B, 6])"), ("(%gate, %a)", "(%z, %a)")],
            "glu",
            "operand",
            "reads %gate, expected %z (gate)",
        ),
        _case(
            "another power",
            glu.SQUARED,
            [("exponent = 2", "exponent = 3")],
            "squared_relu",
            "attr",
            "`pow` has exponent = 3, expected 2",
        ),
        _case(
            "extra user",
            glu.SQUARED,
            [("return %y", "return %y, %a")],
            "squared_relu",
            "users",
            "`relu` has 2 users, expected 1",
        ),
    ],
)
def test_glu(text: str, edits: list[Edit], pattern: str, guard: str, said: str) -> None:
    _check(RaiseGlu(), text, edits, pattern, guard, said)


@pytest.mark.parametrize(
    ("text", "edits", "pattern", "guard", "said"),
    [
        _case(
            "dtype", loss.PLAIN, [("f32[", "bf16[")], "cross_entropy", "dtype", "it is computed in bf16, expected f32"
        ),
        _case(
            "layout, classes second",
            loss.PLAIN,
            [("f32[B, 7]", "f32[B, 7, S]"), ("i64[B]", "i64[B, S]")],
            "cross_entropy",
            "shape",
            "the logits are f32[B, 7, S], expected [tokens, vocabulary]",
        ),
        _case(
            "another reduction",
            loss.UPCAST,
            [("reduction = 2", "reduction = 1")],
            "cross_entropy",
            "attr",
            "has reduction = 1, expected 2 (the sum)",
        ),
        _case(
            "weights of classes",
            loss.PLAIN,
            [("%labels: i64[B])", "%labels: i64[B], %w: f32[7])"), ("(%logits, %labels)", "(%logits, %labels, %w)")],
            "cross_entropy",
            "operands",
            "has 3 operands, expected 2",
        ),
    ],
)
def test_loss(text: str, edits: list[Edit], pattern: str, guard: str, said: str) -> None:
    _check(RaiseLoss(), text, edits, pattern, guard, said)


@pytest.mark.parametrize(
    ("text", "edits", "pattern", "guard", "said"),
    [
        _case(
            "dtype",
            attention.FUSED,
            [("%v: f32", "%v: bf16")],
            "attention",
            "dtype",
            "q, k, v and the result have several dtypes: ['bf16', 'f32']",
        ),
        _case(
            "layout, keys not transposed",
            attention.WRITTEN_OUT,
            [
                ("dims = [0, 1, 3, 2]", "dims = [0, 1, 2, 3]"),
                ("%t: f32[B, 4, 8, S]", "%t: f32[B, 4, S, 8]"),
                ("%q: f32[B, 4, S, 8]", "%q: f32[B, 4, S, S]"),
            ],
            "attention",
            "attr",
            "`permute` has dims = (0, 1, 2, 3), expected (0, 1, 3, 2)",
        ),
        _case(
            "layout, softmax over queries",
            attention.WRITTEN_OUT,
            [("{dim = -1}", "{dim = 2}")],
            "attention",
            "attr",
            "`softmax` has dim = 2, expected the last dim",
        ),
        *(
            _case(
                f"extra user of {op}",
                attention.WRITTEN_OUT,
                [("return %y", f"return %y, %{value}")],
                "attention",
                "users",
                f"`{op}` has 2 users, expected 1",
            )
            for op, value in (("matmul", "a"), ("mul", "b"), ("masked_fill", "c"), ("softmax", "d"))
        ),
        _case("shape", attention.FUSED, [("%v: f32[B, 2", "%v: f32[B, 1")], "attention", "shape", "do not fit"),
        _case(
            "shape, a width that is not a number",
            attention.FUSED.replace("enable_gqa = true, ", "").replace("[B, 2, S, 8]", "[B, 4, S, 8]"),
            [("S, 8]", "S, B]")],
            "attention",
            "shape",
            "the head width of f32[B, 4, S, B] is not a number",
        ),
        _case(
            "mask with numbers of a parameter",
            attention.MASKED,
            [("f32[B, 2, S, 8]) {", "f32[B, 2, S, 8], %bias: f32[S, S]) {"), ("%vc, %seen)", "%vc, %bias)")],
            "attention",
            "mask",
            "the mask %bias cannot be read",
        ),
        _case(
            "dropout",
            attention.FUSED,
            [("is_causal = true", "is_causal = true, dropout_p = 0.1")],
            "attention",
            "attr",
            "has dropout_p = 0.1, expected no dropout",
        ),
        _case(
            "dropout of the weights",
            attention.WRITTEN_OUT,
            [
                (") {\n", ", %seed: i64[], %step: i64[], %sample: i64[]) {\n"),
                (
                    "  %y: f32[B, 4, S, 8] = aten.matmul.default(%d,",
                    "  %o: f32[B, 4, S, S] = dropout(%d, %seed, %step, %sample) "
                    '{p = 0.1, site = "layers.*", samples = B}\n'
                    "  %y: f32[B, 4, S, 8] = aten.matmul.default(%o,",
                ),
            ],
            "attention",
            "dropout",
            "the weights are dropped with p = 0.1",
        ),
        _case(
            "step of the slice",
            attention.SINKS,
            [
                ("{dim = 3, end = S}", "{dim = 3, end = S, step = 1}"),
                ("step = 1}", "step = 2}"),
                ("%h: f32[B, 4, S, S]", "%h: f32[B, 4, S, 8]"),
            ],
            "attention",
            "sinks",
            "",
        ),
    ],
)
def test_attention(text: str, edits: list[Edit], pattern: str, guard: str, said: str) -> None:
    _check(RaiseAttention(), text, edits, pattern, guard, said)


@pytest.mark.parametrize(
    ("text", "edits", "pattern", "guard", "said"),
    [
        _case(
            "dtype",
            moe.ROUTE,
            [("f32[", "bf16[")],
            "moe_route",
            "dtype",
            "the softmax is computed in bf16, expected f32",
        ),
        _case(
            "dtype of the sigmoid",
            moe.GROUPS,
            [("f32[", "bf16["), ("dtype = f32", "dtype = bf16")],
            "moe_route",
            "dtype",
            "the sigmoid is computed in bf16, expected f32",
        ),
        _case(
            "layout, scores of another dim",
            moe.ROUTE,
            [("aten.softmax.int(%logits) {dim = -1}", "aten.softmax.int(%logits) {dim = 0}")],
            "moe_route",
            "attr",
            "`softmax` has dim = 0, expected the last dim",
        ),
        _case(
            "extra user",
            moe.GROUPS,
            [("return %w", "return %w, %q")],
            "moe_route",
            "users",
            "`sum` has 2 users, expected 1",
        ),
        _case(
            "shape",
            moe.ROUTE,
            [("[B, ", "[B, S, ")],
            "moe_route",
            "shape",
            "the logits are f32[B, S, 4], expected [tokens, experts]",
        ),
        _case(
            "mark of the groups",
            moe.GROUPS,
            [("fill_value = 0.0", "fill_value = 2.0")],
            "moe_route",
            "groups",
            "groups are marked by 1.0 in 2.0, expected 1.0 in 0.0",
        ),
        _case(
            "side of the bounds",
            moe.EXPERTS,
            [("right = true", "right = false")],
            "moe_dispatch",
            "attr",
            "`searchsorted` has right = False, expected True",
        ),
        _case(
            "dtype of the offsets",
            moe.EXPERTS,
            [
                (
                    "%offsets: i32[4] = aten.searchsorted.Tensor(%e, %c) {out_int32 = true, right = true}",
                    "%o: i64[4] = aten.searchsorted.Tensor(%e, %c) {right = true}\n"
                    "  %offsets: i32[4] = cast(%o) {dtype = i32}",
                )
            ],
            "moe_dispatch",
            "op",
            "reads `cast`, expected `searchsorted`",
        ),
        _case(
            "two sorts",
            moe.EXPERTS,
            [
                (
                    "  %c: i64[4]",
                    "  %e2: i64[2*B], %order2: i64[2*B] = aten.sort.stable(%b) {stable = true}\n  %c: i64[4]",
                ),
                ("searchsorted.Tensor(%e,", "searchsorted.Tensor(%e2,"),
            ],
            "moe_dispatch",
            "shape",
            "rows and offsets come from two sorts, expected one",
        ),
        _case(
            "extra user",
            moe.EXPERTS,
            [("return %y", "return %y, %q")],
            "moe_combine",
            "users",
            "has 2 users, expected 1",
        ),
        _case(
            "dtype",
            moe.EXPERTS,
            [
                (
                    "  %m: f32[B, 2, 6] = aten.mul.Tensor(%r, %u)\n",
                    "  %r2: bf16[B, 2, 6] = cast(%r) {dtype = bf16}\n  %u2: bf16[B, 2, 1] = cast(%u) {dtype = bf16}\n"
                    "  %m: bf16[B, 2, 6] = aten.mul.Tensor(%r2, %u2)\n",
                ),
                ("%y: f32[B, 6]", "%y: bf16[B, 6]"),
            ],
            "moe_combine",
            "dtype",
            "the result is bf16, expected f32 like the rows",
        ),
        _case(
            "layout, sum over the width",
            moe.EXPERTS,
            [("{dim = [1]}", "{dim = [2]}"), ("%y: f32[B, 6]", "%y: f32[B, 2]")],
            "moe_combine",
            "attr",
            "`sum` has dim = (2,), expected (1,)",
        ),
        _case(
            "shape of the rows",
            moe.EXPERTS,
            [
                (
                    "%r: f32[B, 2, 6] = reshape(%q) {shape = [B, 2, 6]}",
                    "%r: f32[B, 2, 3, 2] = reshape(%q) {shape = [B, 2, 3, 2]}",
                ),
                (
                    "%u: f32[B, 2, 1] = reshape(%v) {shape = [B, 2, 1]}",
                    "%u: f32[B, 2, 1, 1] = reshape(%v) {shape = [B, 2, 1, 1]}",
                ),
                ("%m: f32[B, 2, 6]", "%m: f32[B, 2, 3, 2]"),
                ("%y: f32[B, 6]", "%y: f32[B, 3, 2]"),
            ],
            "moe_combine",
            "shape",
            "rows are seen as f32[B, 2, 3, 2] and weights are f32[B, 2], expected [tokens, choices, width]",
        ),
        _case(
            "shape of the weights",
            moe.EXPERTS,
            [
                (
                    "%u: f32[B, 2, 1] = reshape(%v) {shape = [B, 2, 1]}",
                    "%u: f32[1, B, 2, 1] = reshape(%v) {shape = [1, B, 2, 1]}",
                ),
                ("%m: f32[B, 2, 6]", "%m: f32[1, B, 2, 6]"),
                ("%y: f32[B, 6]", "%y: f32[1, 2, 6]"),
            ],
            "moe_combine",
            "shape",
            "weights are seen as f32[1, B, 2, 1], expected one number for each row",
        ),
    ],
)
def test_moe(text: str, edits: list[Edit], pattern: str, guard: str, said: str) -> None:
    _check(RaiseMoe(), text, edits, pattern, guard, said)


def test_shape_of_the_offsets() -> None:
    text = moe.EXPERTS.replace("%offsets: i32[4]", "%offsets: i32[3]")
    text = text.replace("%c: i64[4] = aten.arange.default() {end = 4}", "%c: i64[3] = aten.arange.default() {end = 3}")
    _, _, report = raised(RaiseMoe(), text)
    by_pattern = {m.pattern: m.detail.partition(": ")[2] for m in report.near_misses}
    assert by_pattern["moe_dispatch"] == "3 experts are sorted, but the weight is f32[4, 6, 6]"
    assert by_pattern["grouped_matmul"] == "the offsets are i32[3], expected one for each of 4 experts"


def test_a_part_that_may_be_absent_stays_outside() -> None:
    """Heads that are not repeated each for its group, and a sum that others read: the rest is raised without them."""
    whole = (
        "%ka: f32[B, 2, 1, S, 8] = reshape(%k) {shape = [B, 2, 1, S, 8]}",
        "%ka: f32[B, 1, 2, S, 8] = reshape(%k) {shape = [B, 1, 2, S, 8]}",
    )
    before, after, report = raised(RaiseAttention(), attention.MASKED.replace(*whole))
    (node,) = (n for n in after.functions["f"].nodes if n.op == "attention")
    assert [v.name for v in node.operands] == ["q", "kc", "vc"] and report.near_misses == []
    assert_same(before, after)
    before, after, report = raised(RaiseMoe(), moe.ROUTE.replace("return %w, %i", "return %w, %i, %s"))
    (node,) = (n for n in after.functions["f"].nodes if n.op == "moe_route")
    assert "renormalize" not in node.attrs and report.near_misses == []
    assert_same(before, after)
