"""fuse-norm: both forms, each guard broken once, and the training graphs of models."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from mgraph.compiler import build_module
from mgraph.errors import PassError
from mgraph.ir.dims import evaluate
from mgraph.ir.interpreter import run
from mgraph.passes.fuse_norm import FuseNorm
from mgraph.passes.pipeline import check_order, parse_pipeline
from mgraph.passes.placing import rules_of
from mgraph.recipe import Recipe
from tests.passes import test_placing
from tests.passes.raising import assert_same, near_misses, ops, raised

FORWARD = """
func @f(%x: bf16[B, S, 16], %r: bf16[B, S, 16], %w: bf16[16]) {
  %s: bf16[B, S, 16] = aten.add.Tensor(%x, %r)
  %u: bf16[B, S, 16] = aten.neg.default(%s)
  %y: bf16[B, S, 16], %rstd: f32[B, S, 1] = rms_norm(%s, %w) {eps = 1e-05, offset = 1.0, round = "normed"}
  return %y, %s, %u, %rstd
}
"""
BACKWARD = """
func @f(%dy: bf16[B, 16], %s: bf16[B, 16], %w: f32[16], %rstd: f32[B, 1], %d: bf16[B, 16]) {
  %dx: bf16[B, 16], %dw: f32[16] = rms_norm_grad(%dy, %s, %w, %rstd) {eps = 1e-05, offset = 0.0, round = "normed"}
  %t: bf16[B, 16] = aten.add.Tensor(%d, %dx)
  return %t, %dw
}
"""


def test_forward() -> None:
    """The sum goes on to other readers under its name; attributes are those of the norm."""
    before, after, report = raised(FuseNorm(), FORWARD)
    fused, _ = after.functions["f"].nodes
    assert ops(after.functions["f"]) == {"add_rms_norm": 1, "aten.neg.default": 1}
    assert [v.name for v in fused.operands] == ["x", "r", "w"]
    assert fused.attrs == {"eps": 1e-5, "offset": 1.0, "round": "normed"}
    assert [v.type for v in fused.results] == [v.type for n in before.functions["f"].nodes[::2] for v in n.results]
    assert report.counts == {"add_rms_norm": 1}
    assert_same(before, after)


@pytest.mark.parametrize("terms", ["(%d, %dx)", "(%dx, %d)"])
def test_backward(terms: str) -> None:
    before, after, report = raised(FuseNorm(), BACKWARD.replace("(%d, %dx)", terms))
    (fused,) = after.functions["f"].nodes
    assert (fused.op, [v.name for v in fused.operands]) == ("add_rms_norm_grad", ["dy", "d", "s", "w", "rstd"])
    assert report.counts == {"add_rms_norm_grad": 1}
    assert_same(before, after)


def test_one_sum_of_two_norms_is_fused_with_one_of_them() -> None:
    text = FORWARD.replace("return %y", "return %z, %q, %y").replace(
        "  return", "  %z: bf16[B, S, 16], %q: f32[B, S, 1] = rms_norm(%s, %w) {eps = 1e-06}\n  return"
    )
    before, after, _ = raised(FuseNorm(), text)
    assert ops(after.functions["f"]) == {"add_rms_norm": 1, "rms_norm": 1, "aten.neg.default": 1}
    assert_same(before, after)


@pytest.mark.parametrize("made", ["aten.mul.Tensor(%x, %r)", "aten.add.Tensor(%x) {other = 1.0}"])
def test_a_norm_of_what_is_no_sum_is_no_near_miss(made: str) -> None:
    assert near_misses(FuseNorm(), FORWARD.replace("aten.add.Tensor(%x, %r)", made)) == []


@pytest.mark.parametrize(
    ("text", "edits", "expected"),
    [
        (FORWARD, [("(%x, %r)", "(%x, %r) {alpha = 2}")], "`add` has alpha = 2, expected none"),
        (FORWARD, [("%r: bf16[B, S, 16]", "%r: bf16[S, 16]")], "residual is bf16[S, 16], expected bf16[B, S, 16] like"),
        (FORWARD, [("%x: bf16", "%x: f32"), ("%s: bf16", "%s: f32"), ("%u: bf16", "%u: f32"), ("%y: bf16", "%y: f32")],
         "residual is bf16[B, S, 16], expected f32[B, S, 16] like sum"),
        (FORWARD, [("%w: bf16", "%v: bf16"), ("  %y", "  %w: bf16[16] = aten.neg.default(%v)\n  %y")],
         "%s is read before %w is made"),
        (BACKWARD, [("return %t", "return %dx, %t")], "`rms_norm_grad` has 2 users, expected 1"),
        (BACKWARD, [("(%d, %dx)", "(%d, %dx) {alpha = 2}")], "`add` has alpha = 2, expected none"),
        (BACKWARD, [("(%d, %dx)", "(%dx, %dx)")], "the gradient is added to itself"),
        (BACKWARD, [("%d: bf16[B, 16]", "%d: bf16[16]")], "dsum is bf16[16], expected bf16[B, 16] like dx"),
        (BACKWARD, [("%d: bf16", "%d: f32"), ("%t: bf16", "%t: f32")], "dsum is f32[B, 16], expected bf16[B, 16] like"),
        (BACKWARD, [("%d: bf16", "%e: bf16"), ("return %t", "return %m, %t"),
                    ("  %t", "  %m: f32[16] = aten.neg.default(%dw)\n  %d: bf16[B, 16] = aten.neg.default(%e)\n  %t")],
         "%dw is read before %d is made"),
    ],
)  # fmt: skip
def test_near_misses(text: str, edits: list[tuple[str, str]], expected: str) -> None:
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new, 1)
    (miss,) = near_misses(FuseNorm(), text)
    assert expected in miss


def random_text(source: random.Random) -> str:
    """A function of sums, norms and gradients of norms that read each other in any order."""
    big, small, lines = ["a", "b", "c"], ["r"], []
    for number in range(source.randint(3, 12)):
        x, y, z = (source.choice(big[-4:]) for _ in range(3))
        form = source.choice(["sum", "norm", "grad", "neg"])
        if form == "grad":
            given = f"rms_norm_grad(%{x}, %{y}, %w, %{source.choice(small)}) {{eps = 1e-05}}"
            lines.append(f"  %v{number}: f64[B, 4], %g{number}: f64[4] = {given}")
        elif form == "norm":
            lines.append(f"  %v{number}: f64[B, 4], %r{number}: f32[B, 1] = rms_norm(%{x}, %w) {{eps = 1e-05}}")
            small.append(f"r{number}")
        else:
            given = f"aten.add.Tensor(%{x}, %{z})" if form == "sum" else f"aten.neg.default(%{x})"
            lines.append(f"  %v{number}: f64[B, 4] = {given}")
        big.append(f"v{number}")
    made = [line.split(":")[0].strip() for line in lines if source.choice([True, False])]
    results = ", ".join(dict.fromkeys([*made, f"%{big[-1]}"]))
    head = "func @f(%a: f64[B, 4], %b: f64[B, 4], %c: f64[B, 4], %r: f32[B, 1], %w: f64[4]) {"
    return "\n".join([head, *lines, f"  return {results}", "}"])


def test_random_functions() -> None:
    """Whatever reads what, the results stay, and none is computed twice."""
    source, fused = random.Random(5), Counter[str]()
    for _ in range(300):
        before, after, report = raised(FuseNorm(), random_text(source))
        inputs = {
            v.name: torch.randn([int(evaluate(d, {"B": 3})) for d in v.tensor.shape], dtype=torch.float64)
            for v in before.entry_function("forward").params
        }
        want, have = (run(m, "forward", inputs, {}, lifted=True)[0] for m in (before, after))
        for name, tensor in want.items():
            torch.testing.assert_close(have[name], tensor, rtol=1e-9, atol=1e-9)
        counts = [ops(module.functions["f"]) for module in (before, after)]
        assert counts[1].total() == counts[0].total() - sum(report.counts.values())
        fused.update(report.counts)
    assert min(fused["add_rms_norm"], fused["add_rms_norm_grad"]) > 15, fused


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("dense-tiny", {}),
        pytest.param(
            "dense-tiny",
            {"mesh": "fsdp=2,tp=2", "sequence_parallel": True, "recompute": "full"},
            marks=pytest.mark.full,
        ),
        pytest.param("moe-tiny", {"precision": "fp16", "disable": "fuse-residual"}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_training_graphs(model: str, options: dict[str, object]) -> None:
    """In each layer the norm of the sum inside it, and both gradients; equal on the twin, over any mesh."""
    done = build_module(Recipe(model=model, target="h100", verify=True, **options))  # type: ignore[arg-type]
    (result,) = (r for r in done.results if r.name == "fuse-norm")
    assert result.report.near_misses == []
    assert {m.function for m in result.report.matches} >= {"layer", "layer.bwd"}
    assert ops(done.module.functions["layer.bwd"])["add_rms_norm_grad"] == 2
    checked = result.measured["verify"]
    assert checked["status"] == "verified" and checked["error"] <= 1e-9 and checked["native"] <= 1.5


@pytest.mark.parametrize(
    ("op", "shapes"),
    [
        ("add_rms_norm", [(4, 6, 5), (4, 6, 5), (5,)]),
        ("add_rms_norm_grad", [(4, 6, 5), (4, 6, 5), (4, 6, 5), (5,), (4, 6, 1)]),
    ],
)
def test_parts_give_parts(op: str, shapes: list[tuple[int, ...]]) -> None:
    """Both leading dims may be split; the weight's gradient is then a sum over ranks."""
    node = test_placing._node(op, shapes, {"eps": 1e-6, "offset": 0.0, "round": "product"})
    rules = rules_of(node, 2)
    assert len(rules) == 2
    for rule in rules:
        test_placing._check(node, rule)


def test_it_runs_before_in_place() -> None:
    assert check_order(parse_pipeline("canonicalize,fuse-norm,in-place"))
    with pytest.raises(PassError, match="cannot run where the property 'in-place' holds"):
        check_order(parse_pipeline("canonicalize,in-place,fuse-norm"))
