"""fuse-rope: both forms with and without a permutation, each guard broken once, and the training graph of a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from mgraph.compiler import build_module, pipeline_text
from mgraph.passes.fuse_rope import FuseRope
from mgraph.recipe import Recipe
from tests.families.configs import write_config
from tests.passes.raising import assert_same, near_misses, ops, raised

FORWARD = """
func @f(%x: bf16[B, S, 2, 8], %w: bf16[8], %cos: bf16[1, S, 8], %sin: bf16[1, S, 8]) {
  %n: bf16[B, S, 2, 8], %rstd: f32[B, S, 2, 1] = rms_norm(%x, %w) {eps = 1e-05, offset = 1.0, round = "normed"}
  %p: bf16[B, 2, S, 8] = aten.permute.default(%n) {dims = [0, 2, 1, 3]}
  %y: bf16[B, 2, S, 8] = rope(%p, %cos, %sin) {style = "interleaved"}
  return %y, %rstd
}
"""
BACKWARD = """
func @f(%dy: bf16[B, 2, S, 8], %x: bf16[B, S, 2, 8], %w: f32[8], %r: f32[B, S, 2, 1], %cos: f32[B, 1, S, 4],
        %sin: f32[B, 1, S, 4]) {
  %t: bf16[B, 2, S, 8] = rope(%dy, %cos, %sin) {inverse = true, style = "half"}
  %p: bf16[B, S, 2, 8] = aten.permute.default(%t) {dims = [0, 2, 1, 3]}
  %dx: bf16[B, S, 2, 8], %dw: f32[8] = rms_norm_grad(%p, %x, %w, %r) {eps = 1e-05, round = "normed"}
  return %dx, %dw
}
""".replace(",\n        ", ", ")


def without_permutation(text: str) -> str:
    """The same chain in one layout; the tables are then those of any heads."""
    lines = [line for line in text.splitlines() if "permute" not in line]
    return "\n".join(lines).replace("[B, 2, S", "[B, S, 2").replace("(%p,", "(%n," if "%n:" in text else "(%t,")


def test_forward() -> None:
    """The result is permuted in place of what was normalised, and so are the tables; what is saved stays."""
    before, after, report = raised(FuseRope(), FORWARD)
    function = after.functions["f"]
    assert ops(function) == {"reshape": 2, "aten.permute.default": 3, "norm_rope": 1}
    (fused,) = (n for n in function.nodes if n.op == "norm_rope")
    assert [str(v.type) for v in fused.operands] == ["bf16[B, S, 2, 8]", "bf16[8]", *["bf16[1, S, 1, 8]"] * 2]
    assert fused.attrs == {"eps": 1e-5, "offset": 1.0, "round": "normed", "style": "interleaved"}
    assert [str(v.type) for v in function.results] == ["bf16[B, 2, S, 8]", "f32[B, S, 2, 1]"]
    assert report.counts == {"norm_rope": 1}
    assert_same(before, after)


def test_backward() -> None:
    before, after, report = raised(FuseRope(), BACKWARD)
    function = after.functions["f"]
    assert ops(function) == {"aten.permute.default": 3, "norm_rope_grad": 1}
    fused = function.nodes[-1]
    assert [str(v.type) for v in fused.operands[3:5]] == ["f32[B, S, 1, 4]"] * 2
    assert report.counts == {"norm_rope_grad": 1}
    assert_same(before, after)


def test_any_permutation_of_the_rows() -> None:
    """One that is not its own inverse: tables go the way back forward, and the way there backward."""
    forward = FORWARD.replace("[0, 2, 1, 3]", "[2, 0, 1, 3]").replace("[B, 2, S", "[2, B, S")
    forward = forward.replace("[1, S, 8]", "[B, S, 8]")
    backward = BACKWARD.replace("[0, 2, 1, 3]", "[1, 2, 0, 3]").replace("[B, 2, S", "[2, B, S")
    backward = backward.replace("[B, 1, S, 4]", "[B, S, 4]")
    for text in (forward, backward):
        before, after, report = raised(FuseRope(), text)
        assert sum(report.counts.values()) == 1
        assert_same(before, after)


@pytest.mark.parametrize("text", [FORWARD, BACKWARD])
def test_without_permutation(text: str) -> None:
    text = without_permutation(text).replace("[1, S, 8]", "[S, 1, 8]").replace("[B, 1, S, 4]", "[B, S, 1, 4]")
    before, after, report = raised(FuseRope(), text)
    assert set(ops(after.functions["f"])) == set(report.counts) and len(after.functions["f"].nodes) == 1
    assert_same(before, after)


@pytest.mark.parametrize(
    ("text", "edits", "expected"),
    [
        (FORWARD, [("return %y", "return %n, %y")], "`rms_norm` has 2 users, expected 1"),
        (FORWARD, [("return %y", "return %p, %y")], "`permute` has 2 users, expected 1"),
        (FORWARD, [("%cos: bf16", "%c: bf16"), ("return %y", "return %y, %q"),
                   ("  %y", "  %q: f32[B, S, 2, 1] = aten.neg.default(%rstd)\n"
                    "  %cos: bf16[1, S, 8] = aten.neg.default(%c)\n  %y")], "%rstd is read before %cos is made"),
        (FORWARD, [("[0, 2, 1, 3]", "[0, 3, 1, 2]"), ("[B, 2, S, 8]", "[B, 8, S, 2]"), ("[B, 2, S, 8]", "[B, 8, S, 2]"),
                   ("[1, S, 8]", "[1, S, 2]"), ("[1, S, 8]", "[1, S, 2]")], "which moves what is normalised"),
        (BACKWARD, [("return %dx", "return %t, %dx")], "`rope` has 2 users, expected 1"),
        (BACKWARD, [("%dy: bf16", "%dy: f32"), ("%t: bf16", "%t: f32"), ("%p: bf16", "%p: f32")],
         "the gradient is f32, expected bf16 like x"),
    ],
)  # fmt: skip
def test_near_misses(text: str, edits: list[tuple[str, str]], expected: str) -> None:
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new, 1)
    (miss,) = near_misses(FuseRope(), text)
    assert expected in miss


def test_rotations_of_anything_else_are_no_near_misses() -> None:
    text = FORWARD.replace("rms_norm(%x, %w)", "layer_norm(%x, %w, %w)")
    text = text.replace("%n: bf16[B, S, 2, 8], %rstd", "%n: bf16[B, S, 2, 8], %mean: f32[B, S, 2, 1], %rstd")
    assert near_misses(FuseRope(), text.replace(', offset = 1.0, round = "normed"', "")) == []


@pytest.mark.parametrize(
    ("family", "options"),
    [
        pytest.param("qwen3", {"precision": "bf16"}, marks=pytest.mark.full),
        pytest.param("gemma3", {"packed": True, "recompute": "full"}, marks=pytest.mark.full),
        pytest.param("qwen3", {"mesh": "fsdp=2,tp=2", "sequence_parallel": True}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_training_graphs(
    family: str, options: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries and keys of each layer, forward and backward; equal on the twin, over any mesh and with packed rows."""
    recipe = Recipe(model=str(write_config(family, tmp_path)), target="cpu", verify=True, **options)  # type: ignore[arg-type]
    text = pipeline_text(recipe).replace("cse,dce,in-place", "fuse-rope,cse,dce,in-place")
    monkeypatch.setattr("mgraph.compiler.pipeline_text", lambda recipe: text)
    done = build_module(recipe)
    (result,) = (r for r in done.results if r.name == "fuse-rope")
    assert result.report.near_misses == []
    backward = next(f for name, f in done.module.functions.items() if name.endswith("layer.bwd"))
    assert ops(backward)["norm_rope_grad"] == 2 and ops(backward)["rope"] == 0
    checked = result.measured["verify"]
    assert checked["status"] == "verified" and checked["error"] <= 1e-9 and checked["native"] <= 1.5
