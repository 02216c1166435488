"""fuse-loss: the pair becomes one op with equal results, and each guard broken once; the step that is emitted of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mgraph.codegen.kernel_sites import kernel_sites
from mgraph.codegen.memory import RankMemory
from mgraph.codegen.step import step_text
from mgraph.codegen.triton import build_kernels
from mgraph.compiler import build_module
from mgraph.ir.graph import Module
from mgraph.ir.torch_bridge import to_torch_dtype
from mgraph.ir.verifier import verify
from mgraph.passes.activations import extents
from mgraph.passes.base import Report
from mgraph.passes.fuse_loss import FuseLoss
from mgraph.passes.in_place import InPlace
from mgraph.recipe import Recipe
from mgraph.runtime import kernels as runtime
from tests.passes.raising import assert_same, module_of, raised

TEXT = """
func @f(%x: bf16[B, 1, 7], %labels: i64[B], %scale: f32[]) {
  %made: bf16[B, 1, 7] = aten.mul.Tensor(%x, %x)
  %logits: bf16[B, 7] = reshape(%made) {shape = [B, 7]}
  %sum: f32[], %lse: f32[B] = cross_entropy(%logits, %labels) {classes = 5}
  %twice: f32[] = aten.add.Tensor(%sum, %sum)
  %one: f32[] = aten.ones.default() {dtype = f32, size = []}
  %dsum: f32[] = aten.mul.Tensor(%one, %scale)
  %dlogits: bf16[B, 7] = cross_entropy_grad(%dsum, %logits, %labels, %lse) {classes = 5, ignore_index = -100}
  %y: bf16[B, 7] = aten.add.Tensor(%dlogits, %dlogits)
  return %y, %twice, %lse
}
"""
KEPT = """
func @f(%x: bf16[B, 7], %labels: i64[B], %dsum: f32[], %lse: f32[B]) {
  %made: bf16[B, 7] = aten.mul.Tensor(%x, %x)
  %dlogits: bf16[B, 7] = cross_entropy_grad(%dsum, %made, %labels, %lse)
  return %dlogits, %made
}
"""
LABELS = torch.tensor([4, -100, 0])


def test_joins_a_loss_with_its_gradient() -> None:
    before, after, report = raised(FuseLoss(), TEXT)
    function = after.functions["f"]
    assert [node.op.split(".")[1] if "." in node.op else node.op for node in function.nodes] == [
        "mul", "reshape", "ones", "mul", "cross_entropy_with_grad", "add", "add",
    ]  # fmt: skip
    (both,) = (node for node in function.nodes if node.op == "cross_entropy_with_grad")
    assert [v.name for v in both.operands] == ["logits", "labels", "dsum"]
    assert [v.name for v in both.results] == ["sum", "lse", "dlogits"]
    (match,) = report.matches
    assert match.replaced == ("sum", "dlogits") and report.near_misses == []
    assert_same(before, after, labels=LABELS)


def test_a_loss_without_a_gradient_stays() -> None:
    text = TEXT.replace(
        "  %dlogits: bf16[B, 7] = cross_entropy_grad(%dsum, %logits, %labels, %lse)",
        "  %dlogits: bf16[B, 7] = aten.add.Tensor(%logits, %logits)",
    )
    before, after, report = raised(FuseLoss(), text.replace(" {classes = 5, ignore_index = -100}", ""))
    assert after is before and report.near_misses == []


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("%lse) {", "%other) {", "loss: %other is not made by a cross_entropy in this function"),
        ("%dsum, %logits", "%dsum, %flat", "operands: the loss is of (%logits, %labels), the gradient of (%flat, %lab"),
        ("{classes = 5, ig", "{classes = 6, ig", "attributes: the loss has {'ignore_index': -100, 'classes': 5}, the"),
        ("Tensor(%one, %scale)", "Tensor(%one, %twice)", "cotangent: %dsum depends on the loss"),
        ("(%dlogits, %dlogits)", "(%dlogits, %logits)", "logits: %logits is read again by `aten.add.Tensor`"),
        ("return %y,", "return %logits,", "logits: %logits is a result of the function"),
        ("%made) {", "%x) {", "logits: %x is not made in this function"),
    ],
)
def test_near_misses(old: str, new: str, expected: str) -> None:
    text = TEXT.replace("%scale: f32[])", "%scale: f32[], %other: f32[B], %flat: bf16[B, 7])")
    assert old in text
    before, after, report = raised(FuseLoss(), text.replace(old, new))
    assert after is before
    (miss,) = report.near_misses
    assert f"{miss.guard}: {miss.detail}".startswith(expected)


def test_a_split_vocabulary_is_a_near_miss() -> None:
    text = """
func @f(%dsum: f32[], %logits: bf16[B, 512], %labels: i64[B], %lse: f32[B], %index: i64[]) {
  %dlogits: bf16[B, 512] = cross_entropy_part_grad(%dsum, %logits, %labels, %lse, %index)
  return %dlogits
}
"""
    before, after, report = raised(FuseLoss(), text)
    assert after is before
    (miss,) = report.near_misses
    assert miss.guard == "vocabulary" and "split over ranks" in miss.detail


def test_what_the_logits_are_a_view_of_counts() -> None:
    text = TEXT.replace("(%dlogits, %dlogits)", "(%dlogits, %again)").replace(
        "  %y: bf16", "  %again: bf16[B, 7] = reshape(%made) {shape = [B, 7]}\n  %y: bf16"
    )
    _, _, report = raised(FuseLoss(), text)
    (miss,) = report.near_misses
    assert miss.detail == "%made is read again by `reshape`"


@pytest.fixture(scope="module")
def trained() -> Module:
    """A model in training, before what the pass must come before."""
    return build_module(Recipe(model="dense-tiny", target="cpu", precision="bf16", disable="in-place")).module


def emitted(module: Module, directory: Path, *, gpu: bool = False) -> tuple[str, dict[str, Any]]:
    """The text of the module's step, and what it defines; with `gpu` of kernel sites for one, as twins."""
    module = InPlace().run(module, Report())
    sites = kernel_sites(module, gpu=gpu)
    directory.mkdir()
    entries = build_kernels(sites.specs, directory, archs=())
    (directory / "manifest.json").write_text(json.dumps({"kernels": entries}))
    text = step_text(module, sites)
    names: dict[str, Any] = {"__file__": str(directory / "step.py"), "__name__": "step"}
    exec(compile(text, "step.py", "exec"), names)
    return text, names


def test_a_step_takes_the_logits_memory(trained: Module, tmp_path: Path) -> None:
    """The emitted microbatch writes the gradient over the logits, and updates all state as before, bit for bit."""
    report = Report()
    after = FuseLoss().run(trained, report)
    verify(after)
    assert [(m.function, m.node) for m in report.matches] == [("microbatch", "cross_entropy")]
    assert report.near_misses == []
    text, names = emitted(after, tmp_path / "after")
    assert "= rt.cross_entropy_with_grad(reshape, flatten, d_loss_sum, out=reshape)" in text
    _, old_names = emitted(trained, tmp_path / "before")
    runtime.set_device("cpu")
    torch.manual_seed(0)
    states = []
    for state in trained.state.values():
        shape, dtype = [int(d) for d in state.type.shape], to_torch_dtype(state.type.dtype)
        states.append((0.1 * torch.randn(shape)).to(dtype))
    ours, theirs = ({n: t.clone() for n, t in zip(trained.state, states, strict=True)} for _ in range(2))
    tokens, labels = torch.randint(256, (2, 9)), torch.randint(256, (2, 9))
    labels[0, :4] = -100
    made = [step["microbatch"](held, tokens, labels) for step, held in ((old_names, theirs), (names, ours))]
    assert all(torch.equal(old, new) for old, new in zip(*made, strict=True))
    assert all(torch.equal(ours[name], theirs[name]) for name in trained.state)


def test_a_kernel_that_writes_over_logits_gets_a_copy_where_they_are_read_again() -> None:
    """The kernels of the loss and of its gradient write in place; what they may not take is copied for them."""
    module = module_of(KEPT)
    text = step_text(module, kernel_sites(module, gpu=True))
    assert "= K.cross_entropy_bwd_0(dsum, made.clone(), labels, lse)" in text
    module = module_of(KEPT.replace("return %dlogits, %made", "return %dlogits"))
    text = step_text(module, kernel_sites(module, gpu=True))
    assert "= K.cross_entropy_bwd_0(dsum, made, labels, lse)" in text
    fused = FuseLoss().run(module_of(TEXT), Report())
    assert "= K.cross_entropy_0(logits, labels, one)" in step_text(fused, kernel_sites(fused, gpu=True))


def test_predicted_memory(trained: Module) -> None:
    """The gradient counts as lying in the logits' memory; the sum and the rows' lse have their own."""
    after = FuseLoss().run(trained, Report())
    peaks = []
    for module in (trained, after):
        memory = RankMemory(InPlace().run(module, Report()), extents(module, {"B": 4, "S": 64}), {})
        peaks.append(memory.entry("microbatch").bytes)
    assert abs(peaks[1] - peaks[0]) <= 4, "the cotangent is made one node earlier"
