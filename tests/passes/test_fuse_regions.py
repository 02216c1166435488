"""fuse-regions: which groups are found, what they save, and each guard broken once."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from mgraph.compiler import build_module
from mgraph.ir.graph import Function
from mgraph.ir.interpreter import run
from mgraph.ir.parser import parse_module
from mgraph.ir.printer import print_module
from mgraph.ir.verifier import verify
from mgraph.passes.base import Report, Tier
from mgraph.passes.equivalence import check
from mgraph.passes.fuse_regions import FuseRegions
from mgraph.passes.pipeline import parse_pipeline
from mgraph.passes.samples import Shapes
from mgraph.recipe import Recipe
from tests.passes.raising import assert_same, inputs_of, module_of, ops, raised

CAPPED = """
func @f(%x: f32[B, S, 200], %w: f32[200]) {
  %a: f32[B, S, 200] = aten.div.Tensor(%x) {other = 4.0}
  %b: f32[B, S, 200] = aten.tanh.default(%a)
  %c: f32[B, S, 200] = aten.mul.Tensor(%b, %w)
  return %c, %b
}
"""
SOFTMAX = """
func @f(%x: f32[B, S, 200], %m: f32[B, S, 1]) {
  %a: f32[B, S, 200] = aten.mul.Tensor(%x, %m)
  %t: f32[B, S, 1] = aten.amax.default(%a) {dim = [-1], keepdim = true}
  %d: f32[B, S, 200] = aten.sub.Tensor(%a, %t)
  %e: f32[B, S, 200] = aten.exp.default(%d)
  %s: f32[B, S] = aten.sum.dim_IntList(%e) {dim = [-1]}
  %r: f32[B, S] = aten.reciprocal.default(%s)
  %u: f32[B, S, 1] = aten.unsqueeze.default(%r) {dim = -1}
  %y: f32[B, S, 200] = aten.mul.Tensor(%e, %u)
  return %y, %s
}
"""
AROUND = """
func @f(%x: f32[B, S, 8], %w: f32[8, 8], %v: f32[B, S, 8]) {
  %a: f32[B, S, 8] = aten.sin.default(%x)
  %p: f32[B, S, 8] = aten.matmul.default(%a, %w)
  %b: f32[B, S, 8] = aten.mul.Tensor(%a, %v)
  %c: f32[B, S, 8] = aten.add.Tensor(%b, %p)
  return %c
}
"""
EAGER = FuseRegions(saved=1, rows=1)


def only(function: Function) -> tuple[list[str], list[str]]:
    """The names of what the only region reads and gives."""
    (node,) = [node for node in function.nodes if node.op == "region"]
    return [v.name for v in node.operands], [v.name for v in node.results]


def test_one_node_for_a_chain() -> None:
    before, after, report = raised(FuseRegions(), CAPPED)
    assert ops(after.functions["f"]) == {"region": 1}
    assert only(after.functions["f"]) == (["x", "w"], ["b", "c"])
    (match,) = report.matches
    assert match.replaced == ("a", "b", "c") and match.made == ("b",)
    # Of 8192 positions: x and b read, a, b and c written and a read again; then x, b, c and w once each.
    numbers = 8192 * 200 * 4
    assert match.detail == f"3 nodes over [B, S, 200] save {3 * numbers:,} of {6 * numbers + 800:,} bytes"
    assert_same(before, after)


def test_rows_are_reduced_and_meet_again() -> None:
    before, after, report = raised(FuseRegions(), SOFTMAX)
    assert ops(after.functions["f"]) == {"region": 1} and report.near_misses == []
    assert only(after.functions["f"]) == (["x", "m"], ["s", "y"])
    assert_same(before, after)


@pytest.mark.parametrize("text", [CAPPED, SOFTMAX])
def test_prints_parses_and_gives_the_same_bits(text: str) -> None:
    before, after, _ = raised(FuseRegions(), text)
    again = parse_module(print_module(after))
    verify(again)
    assert print_module(again) == print_module(after)
    inputs = inputs_of(before, {})
    for name, want in run(before, "forward", inputs, {})[0].items():
        assert torch.equal(run(again, "forward", inputs, {})[0][name], want)


def test_nothing_leaves_a_group_and_comes_back() -> None:
    """`a` and `b` are one node before the product, which is then read by a sum that no group may have."""
    before, after, report = raised(EAGER, AROUND)
    assert [n.op for n in after.functions["f"].nodes] == ["region", "aten.matmul.default", "aten.add.Tensor"]
    assert only(after.functions["f"]) == (["x", "v"], ["a", "b"])
    assert [(miss.node, miss.guard) for miss in report.near_misses] == [("c", "order")]
    assert "matmul" in report.near_misses[0].detail
    assert_same(before, after)


def test_two_groups_do_not_wait_for_each_other() -> None:
    """Each pair is free of paths through other nodes, and both together are not."""
    text = """
func @f(%x: f32[B, S, 8], %y: f32[B, S, 4], %w: f32[8, 4], %v: f32[4, 8]) {
  %a: f32[B, S, 8] = aten.sin.default(%x)
  %b: f32[B, S, 4] = aten.sin.default(%y)
  %p: f32[B, S, 4] = aten.matmul.default(%a, %w)
  %q: f32[B, S, 8] = aten.matmul.default(%b, %v)
  %c: f32[B, S, 4] = aten.mul.Tensor(%b, %p)
  %d: f32[B, S, 8] = aten.mul.Tensor(%a, %q)
  return %c, %d
}
"""
    before, after, report = raised(EAGER, text)
    assert sum(node.op == "region" for node in after.functions["f"].nodes) == 1
    assert {miss.guard for miss in report.near_misses} == {"order"}
    assert_same(before, after)


@pytest.mark.parametrize(
    ("text", "old", "new", "guard", "detail"),
    [
        (CAPPED, "aten.tanh.default", "aten.asinh.default", "", ""),
        (CAPPED, "f32", "f64", "step", "aten.div.Tensor of f64; a region takes f32, bf16, f16, i64, i32, bool"),
        (CAPPED, "200", "2*S", "space", "the last dim 2*S is not a known number"),
        (CAPPED, "200", "1", "bytes", "save 98,304 of 196,612 bytes, less than 262,144"),
        (SOFTMAX, "[-1]", "[1]", "step", "aten.amax.default over dim (1,), not over the last one alone"),
        (SOFTMAX, "200", "16385", "space", "a row of 16385 is reduced; a region takes up to 16384"),
        (SOFTMAX, "B, S", "3, 5", "parallelism", "15 rows are reduced, fewer than 64"),
    ],
)
def test_near_misses(text: str, old: str, new: str, guard: str, detail: str) -> None:
    before, after, report = raised(FuseRegions(), text.replace(old, new))
    if not guard:
        assert ops(after.functions["f"])["aten.asinh.default"] == 1 and report.near_misses == []
        return
    assert (guard, True) in [(miss.guard, detail in miss.detail) for miss in report.near_misses], report.near_misses
    assert after is before or any(node.op == "region" for _, node in after.walk())


def test_limits() -> None:
    held = "2 values of 200 columns live at once, 400 elements of a row, more than 399"
    for limit, text, guard, detail in [
        (FuseRegions(tensors=3), CAPPED, "tensors", "4 tensors are read and written, more than 3"),
        (FuseRegions(values=2), CAPPED, "registers", "3 values live at once, more than 2"),
        (FuseRegions(held=399), SOFTMAX, "registers", held),
    ]:
        _, _, report = raised(limit, text)
        assert (guard, detail) in [(miss.guard, miss.detail) for miss in report.near_misses], report.near_misses


def test_the_twin_has_the_same_groups() -> None:
    """A smaller module saves less, and is fused alike all the same; of one without groups the twin has none."""
    small = module_of(CAPPED.replace("200", "2"))
    pass_ = FuseRegions().on_twin(module_of(CAPPED))
    assert ops(pass_.run(small, Report()).functions["f"]) == {"region": 1}
    assert list(parse_pipeline(pass_.spec)) == [pass_]
    assert FuseRegions().run(small, Report()) is small
    assert FuseRegions().on_twin(small).run(module_of(CAPPED), Report()).functions["f"].nodes[0].op != "region"


class Lifted(FuseRegions):
    """The pass, checked on the lifted graph."""

    tier: ClassVar[Tier] = Tier.REASSOCIATING


MODELS = [("dense-tiny-capped", "bf16", 9), ("moe-tiny-losses", "fp32", 5), ("gpt-oss-tiny", "bf16", 5)]


@pytest.mark.full
@pytest.mark.parametrize(("model", "precision", "groups"), MODELS)
def test_models(model: str, precision: str, groups: int) -> None:
    """Steps of the zoo with regions, and without: the same bits, and the same numbers where nothing is rounded."""
    recipe = Recipe(model=model, precision=precision, target="cpu", disable="in-place")
    before, report = build_module(recipe).module, Report()
    after = FuseRegions().run(before, report)
    verify(after)
    assert len(report.matches) == groups
    for pass_ in (FuseRegions(), Lifted()):
        evidence = check(pass_, before, after, Shapes.of(before))
        assert len(evidence) == len(after.entries) and all(found.error <= found.bound for found in evidence)


def test_what_reads_the_same_is_joined() -> None:
    """Two products with a wide value become one node that reads it once; a weight that two groups share joins none."""
    text = """
func @f(%x: f32[B, S, 200], %y: f32[B, S, 200], %z: f32[B, S, 200]) {
  %a: f32[B, S, 200] = aten.mul.Tensor(%x, %y)
  %b: f32[B, S, 200] = aten.mul.Tensor(%x, %z)
  return %a, %b
}
"""
    before, after, report = raised(FuseRegions(), text)
    assert only(after.functions["f"]) == (["x", "y", "z"], ["a", "b"]) and report.near_misses == []
    assert_same(before, after)
    narrow = text.replace("%x: f32[B, S, 200]", "%x: f32[200]")
    assert raised(FuseRegions(), narrow)[2].matches == []


def test_memory_that_nothing_else_reads_is_taken() -> None:
    text = """
func @f(%p: f32[B, S, 24], %w: f32[24, 200]) {
  %x: f32[B, S, 200] = aten.matmul.default(%p, %w)
  %a: f32[B, S, 200] = aten.sigmoid.default(%x)
  %y: f32[B, S, 200] = aten.mul.Tensor(%a, %x)
  return %y
}
"""
    for change, taken in [("", 0), (", %x", None)]:
        before, after, _ = raised(FuseRegions(), text.replace("return %y", f"return %y{change}"))
        assert after.functions["f"].nodes[-1].attrs.get("takes") == taken
        assert_same(before, after)
    (node,) = raised(FuseRegions(), CAPPED)[1].functions["f"].nodes
    assert "takes" not in node.attrs, "what comes from outside stays as it is"


def test_rows_that_lie_over_ranks() -> None:
    """Each rank has its part of every row, in a kernel of that width; but no rank can reduce a whole one."""

    def fused(text: str, size: str) -> list[str]:
        module = module_of(text)
        placed = print_module(module).replace('module "test"', f'module "test"\naxis tp = {size}', 1)
        placed = placed.replace("f32[B, S, 200]", "f32[B, S, 200]{tp=S(2)}").replace("f32[200]", "f32[200]{tp=S(0)}")
        report = Report()
        FuseRegions().run(parse_module(placed), report)
        return [*(match.node for match in report.matches), *sorted({miss.detail for miss in report.near_misses})]

    why = "the last dim of f32[B, S, 200]{tp=S(2)} lies over tp"
    assert fused(CAPPED, "2") == ["c"]
    assert fused(CAPPED, "*") == [why]
    assert why in fused(SOFTMAX, "2")
