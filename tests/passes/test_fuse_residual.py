"""fuse-residual: products that read what they are added to, each guard broken once, and models in training."""

from __future__ import annotations

import pytest

from mgraph.compiler import build_module
from mgraph.passes.fuse_residual import FuseResidual
from mgraph.recipe import Recipe
from tests.passes.raising import assert_same, ops, raised

TEXT = """
func @f(%r: bf16[B, S, 6], %x: bf16[B, S, 4], %z: bf16[B, S, 3], %w: bf16[6, 4], %v: bf16[6, 3]) {
  %y: bf16[B, S, 6] = aten.linear.default(%x, %w)
  %s: bf16[B, S, 6] = aten.add.Tensor(%r, %y)
  %u: bf16[B, S, 6] = aten.linear.default(%z, %v)
  %t: bf16[B, S, 6] = aten.add.Tensor(%u, %s)
  return %s, %t
}
"""


def test_a_residual_of_a_residual() -> None:
    """Whichever side the product stands on; a sum may have other readers."""
    before, after, report = raised(FuseResidual(), TEXT)
    function = after.functions["f"]
    assert ops(function) == {"aten.t.default": 2, "matmul_add": 2}
    sums = [node for node in function.nodes if node.op == "matmul_add"]
    assert [[v.name for v in node.operands[:2]] for node in sums] == [["r", "x"], [sums[0].result.name, "z"]]
    assert report.near_misses == [] and report.counts == {"residual": 2}
    assert_same(before, after)


def test_a_sum_of_two_products_takes_one_of_them() -> None:
    """The other is the residual."""
    text = TEXT.replace("(%r, %y)", "(%u, %y)").replace("(%u, %s)", "(%r, %s)").replace("return %s, %t", "return %t")
    lines = text.strip().splitlines()
    lines[2], lines[3] = lines[3], lines[2]
    before, after, _ = raised(FuseResidual(), "\n".join(lines))
    assert ops(after.functions["f"])["matmul_add"] == 1
    assert_same(before, after)


@pytest.mark.parametrize(
    ("edits", "expected"),
    [
        ([("return %s", "return %y, %s")], "`linear` has 2 users, expected 1"),
        ([("(%r, %y)", "(%r, %y) {alpha = 2}")], "`add` has alpha = 2, expected none"),
        ([("%r: bf16[B, S, 6]", "%r: bf16[S, 6]")], "the residual is bf16[S, 6], the product bf16[B, S, 6], the sum"),
        ([("bf16", "f32")], "it multiplies f32"),
        ([("(%r, %y)", "(%n, %y)"), ("  %y", "  %n: bf16[B, S, 6] = aten.neg.default(%r)\n  %y")],
         "`n` makes the residual"),
    ],
)  # fmt: skip
def test_near_misses(edits: list[tuple[str, str]], expected: str) -> None:
    text = TEXT
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    before, after, report = raised(FuseResidual(), text)
    assert expected in report.near_misses[0].detail
    assert ops(after.functions["f"])["matmul_add"] == ("bf16" in text)  # the other one
    assert_same(before, after)


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "options", "found"),
    [
        ("dense-tiny", {}, 4),
        ("dense-tiny", {"mesh": "fsdp=2", "recompute": "full"}, 5),
        ("dense-tiny", {"mesh": "tp=2"}, 0),
        ("dense-tiny", {"lora": ["*.o: rank=4"]}, 6),  # with those of what the adapter makes
    ],
    ids=str,
)
def test_training_graphs(model: str, options: dict[str, object], found: int) -> None:
    """The sums in each layer, forward, in evaluation, and where they are made again; equal on the twin, over any mesh.
    Over tp there are none: ranks add up what each product made first."""
    done = build_module(Recipe(model=model, precision="bf16", target="h100", verify=True, **options))  # type: ignore[arg-type]
    (result,) = (r for r in done.results if r.name == "fuse-residual")
    assert len(result.report.matches) == found
    checked = result.measured["verify"]
    assert checked["status"] == "verified" and checked["error"] <= 1e-9 and (checked["native"] or 0) <= 1.5
