"""chunk-loss: the head, its loss and their gradients become one op; each guard broken once; the steps emitted of it."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from mgraph.codegen.memory import RankMemory
from mgraph.codegen.triton import cross_entropy
from mgraph.compiler import build_module, pipeline_text
from mgraph.errors import OptionError
from mgraph.ir.graph import Module
from mgraph.ir.torch_bridge import to_torch_dtype
from mgraph.ir.verifier import verify
from mgraph.passes.activations import extents
from mgraph.passes.base import Report
from mgraph.passes.chunk_loss import CHUNKED, ChunkLoss, rows_within
from mgraph.passes.equivalence import check
from mgraph.passes.fuse_loss import FuseLoss
from mgraph.passes.in_place import InPlace
from mgraph.passes.samples import Shapes
from mgraph.recipe import Recipe
from mgraph.runtime import kernels as runtime
from tests.passes.raising import assert_same, module_of, raised
from tests.passes.test_fuse_loss import emitted

TEXT = """
func @f(%x: bf16[B, S, 3], %weight: bf16[7, 3], %labels: i64[B*S], %dsum: f32[], %grad: f32[7, 3]) {
  %linear: bf16[B, S, 7] = aten.linear.default(%x, %weight)
  %logits: bf16[B*S, 7] = reshape(%linear) {shape = [B*S, 7]}
  %sum: f32[], %lse: f32[B*S], %dlogits: bf16[B*S, 7] = cross_entropy_with_grad(%logits, %labels, %dsum)
  %d: bf16[B, S, 7] = reshape(%dlogits) {shape = [B, S, 7]}
  %dx: bf16[B, S, 3] = aten.matmul.default(%d, %weight)
  %flat: bf16[B*S, 7] = reshape(%d) {shape = [B*S, 7]}
  %rows: bf16[B*S, 3] = reshape(%x) {shape = [B*S, 3]}
  %t: bf16[7, B*S] = aten.t.default(%flat)
  %mm: bf16[7, 3] = aten.mm.default(%t, %rows)
  %new: f32[7, 3] = accumulate(%grad, %mm)
  %y: bf16[B, S, 3] = aten.add.Tensor(%dx, %x)
  return %y, %sum, %new
}
"""
LABELS = torch.tensor([4, -100, 0, 6, 6, 1, 2, -100, -100, 5, 0, 3, 3, 1, 1])
BUDGET = 4 * 7 * 2


def test_makes_one_op_of_head_and_loss() -> None:
    before, after, report = raised(ChunkLoss(budget=BUDGET), TEXT)
    function = after.functions["f"]
    assert [node.op for node in function.nodes] == [CHUNKED, "reshape", "aten.add.Tensor"]
    node = function.nodes[0]
    assert [v.name for v in node.operands] == ["grad", "x", "weight", "labels", "dsum"]
    assert [v.name for v in node.results] == ["new", "sum", "dx"] and node.attrs == {"rows": 4}
    (match,) = report.matches
    assert match.replaced == ("linear", "logits", "sum", "d", "dx", "flat", "t", "mm", "new")
    assert report.near_misses == []
    assert_same(before, after, labels=LABELS)


def test_no_budget_no_change() -> None:
    before, after, _ = raised(ChunkLoss(), TEXT)
    assert after is before


def test_rows() -> None:
    logits = module_of(TEXT).functions["f"].nodes[1].result
    assert [rows_within(bytes_, logits) for bytes_ in (1, 14, 27, 28, 14 * 127, 14 * 255, 14 * 256)] == [
        1, 1, 1, 2, 127, 128, 256,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("return %y,", "return %lse, %y,", "lse: %lse is read"),
        ("f32[7, 3]", "bf16[7, 3]", "total: %grad is bf16: every chunk would round the sum to that"),
        ("return %y,", "return %logits, %y,", "logits: %logits is a result of the function"),
        ("return %y,", "return %linear, %y,", "logits: %linear is a result of the function"),
        ("return %y,", "return %flat, %y,", "dlogits: %flat is a result of the function"),
        ("return %y,", "return %mm, %y,", "total: %mm is a result of the function"),
        ("reshape(%linear)", "reshape(%other)", "linear: %other is not made in this function"),
        ("%linear: bf16[B, S, 7] = aten.linear.default(%x, %weight)",
         "%linear: bf16[B, S, 7] = aten.mul.Tensor(%other, %other)",
         "linear: the logits are made by `aten.mul.Tensor`"),
        ("linear.default(%x, %weight)", "linear.default(%x, %weight, %bias)", "bias: `linear` has a bias"),
        ("matmul.default(%d, %weight)", "matmul.default(%d, %again)",
         "dx: 0 of `aten.matmul.default`, `aten.t.default` fit"),
        ("reshape(%x) {", "reshape(%again_x) {", "dweight: 0 of `aten.mm.default` fit"),
        ("accumulate(%grad, %mm)", "aten.mul.Tensor(%grad, %mm)",
         "total: %mm goes to `aten.mul.Tensor`, not to a total"),
        ("return %y,", "return %grad, %y,", "total: %grad is a result of the function"),
        ("aten.t.default(%flat)", "aten.t.default(%other_rows)", "dweight: nothing makes a gradient of %weight"),
        ("accumulate(%grad,", "accumulate(%late,", "total: %late is made after the loss"),
    ],
)  # fmt: skip
def test_near_misses(old: str, new: str, expected: str) -> None:
    more = (
        "%other: bf16[B, S, 7], %bias: bf16[7], %again: bf16[7, 3], %again_x: bf16[B, S, 3], %other_rows: bf16[B*S, 7]"
    )
    text = TEXT.replace("%grad: f32[7, 3])", f"%grad: f32[7, 3], {more})")
    assert old in text
    text = text.replace(old, new)
    if "%late" in text:
        text = text.replace("  %new:", "  %late: f32[7, 3] = aten.neg.default(%grad)\n  %new:")
    before, after, report = raised(ChunkLoss(budget=BUDGET), text)
    assert after is before
    (miss,) = report.near_misses
    assert f"{miss.guard}: {miss.detail}" == expected


def test_a_split_vocabulary_is_a_near_miss() -> None:
    text = """
func @f(%dsum: f32[], %logits: bf16[B, 512], %labels: i64[B], %lse: f32[B], %index: i64[]) {
  %dlogits: bf16[B, 512] = cross_entropy_part_grad(%dsum, %logits, %labels, %lse, %index)
  return %dlogits
}
"""
    _, _, report = raised(ChunkLoss(budget=BUDGET), text)
    (miss,) = report.near_misses
    assert miss.guard == "vocabulary" and "split over ranks" in miss.detail


@functools.cache
def trained(model: str, precision: str, mesh: str = "dp=1") -> Module:
    """A model in training, before what the pass must come before."""
    return build_module(Recipe(model=model, target="cpu", precision=precision, mesh=mesh, disable="in-place")).module


def chunked(module: Module, rows: int) -> Module:
    """The same with the loss of some rows at a time."""
    report = Report()
    size = module.state["embed.weight"].type
    budget = rows * int(size.shape[0]) * size.dtype.bits // 8
    module = ChunkLoss(budget=budget).run(FuseLoss().run(module, Report()), report)
    verify(module)
    assert [m.function for m in report.matches] == ["microbatch"] and report.near_misses == []
    return module


@pytest.mark.parametrize(
    ("model", "precision", "gpu", "bound"),
    [
        ("dense-tiny", "fp32", False, 1e-6),
        ("dense-tiny", "fp32", True, 1e-6),
        ("dense-tiny-geglu", "fp32", False, 1e-6),
        ("dense-tiny", "bf16", False, 1e-2),
    ],
)
def test_the_step_is_that_of_all_rows_at_once(
    model: str, precision: str, gpu: bool, bound: float, tmp_path: Path
) -> None:
    """Loss, count and all sums of gradients of a microbatch whose rows 5 does not divide; embeddings of the second
    model are tied, so that its total gets the gradients of both uses. Relative to the largest element of each."""
    before = trained(model, precision)
    after = chunked(before, 5)
    text, names = emitted(after, tmp_path / "after", gpu=gpu)
    assert f"rt.{CHUNKED}_(" in text and "rows=5" in text and ("loss=K.cross_entropy_0" in text) == gpu
    _, old_names = emitted(before, tmp_path / "before")
    runtime.set_device("cpu")
    torch.manual_seed(0)
    states = {}
    for name, state in before.state.items():
        shape, dtype = [int(d) for d in state.type.shape], to_torch_dtype(state.type.dtype)
        states[name] = (0.1 * torch.randn(shape)).to(dtype)
    ours, theirs = ({n: t.clone() for n, t in states.items()} for _ in range(2))
    tokens, labels = torch.randint(256, (2, 9)), torch.randint(256, (2, 9))
    labels[0, :7] = -100
    made = [step["microbatch"](held, tokens, labels) for step, held in ((old_names, theirs), (names, ours))]
    for old, new in [*zip(*made, strict=True), *((theirs[n], ours[n]) for n in states)]:
        assert old.dtype == new.dtype
        assert (new.double() - old.double()).abs().max() <= bound * max(1.0, float(old.abs().max()))
    assert any(not torch.equal(ours[n], states[n]) for n in states if n.endswith("embed.weight.grad"))


def test_on_two_ranks() -> None:
    """The entries of all ranks of a mesh agree with those before, lifted to 1e-9."""
    module = trained("dense-tiny", "fp32", mesh="dp=2")
    before = FuseLoss().run(module, Report())
    for evidence in check(ChunkLoss(), before, chunked(module, 5), Shapes.of(before)):
        assert evidence.error <= evidence.bound <= 1e-9


def test_the_kernel_of_the_loss() -> None:
    """It is that of the same loss of all rows."""
    node = ChunkLoss(budget=BUDGET).run(module_of(TEXT), Report()).functions["f"].nodes[0]
    assert cross_entropy.chunk_problem_of(node) == cross_entropy.CrossEntropy(7, "bf16")
    wide = ChunkLoss(budget=BUDGET).run(module_of(TEXT.replace("bf16", "f64")), Report()).functions["f"].nodes[0]
    assert "the logits are f64" in str(cross_entropy.chunk_problem_of(wide))


def test_the_recipe_s_pipelines() -> None:
    """For a GPU after what is fused anyway; elsewhere the loss is fused for it."""
    text = "fuse-loss,chunk-loss{budget=1048576},"
    assert text in pipeline_text(Recipe(model="dense-tiny", target="cpu", chunk_loss="1MiB"))
    assert "fuse-loss" in (made := pipeline_text(Recipe(model="dense-tiny", chunk_loss="1MiB")))
    assert made.index("fuse-loss") < made.index("chunk-loss{budget=1048576},")
    assert "chunk-loss" not in pipeline_text(Recipe(model="dense-tiny"))
    for wrong in ("1MB", "0MiB", "-1KiB"):
        with pytest.raises(OptionError, match="chunk_loss is"):
            Recipe(model="dense-tiny", chunk_loss=wrong)


def test_predicted_memory() -> None:
    """The logits of the rows at once are what the node needs besides operands and results: all rows at once are as
    before, fewer take less, up to where another node is the peak."""
    module = trained("dense-tiny", "bf16")
    before, *peaks = (
        RankMemory(InPlace().run(each, Report()), extents(module, {"B": 64, "S": 128}), {}).entry("microbatch")
        for each in (FuseLoss().run(module, Report()), *(chunked(module, rows) for rows in (8192, 7680, 128)))
    )
    assert [p.node.op for p in peaks if p.node] == [f"{CHUNKED}_", f"{CHUNKED}_", "glu_grad"]
    (space,) = (s for s in peaks[0].alive if s.value.name == "workspace")
    assert space.bytes == 8192 * 256 * 2 and str(space.value.type) == "bf16[8192, 256]"
    assert abs(before.bytes - peaks[0].bytes) <= 64, "scalars"
    assert peaks[0].bytes - peaks[1].bytes == 512 * 256 * 2
    assert peaks[2].bytes < peaks[1].bytes
