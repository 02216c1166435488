"""cuda-graphs: what is captured, and what keeps an entry from it."""

from __future__ import annotations

import pytest

from mgraph.compiler import build_module
from mgraph.ir.graph import Module
from mgraph.ir.parser import parse_module
from mgraph.ir.printer import print_module
from mgraph.passes.base import Report
from mgraph.passes.cuda_graphs import CudaGraphs, _obstacle
from mgraph.recipe import Recipe
from tests.passes.raising import module_of


def built(model: str, precision: str) -> Module:
    """A model's step for the CPU, in which nothing is captured."""
    return build_module(Recipe(model=model, precision=precision, target="cpu")).module


@pytest.fixture(scope="module")
def moe() -> dict[str, Module]:
    return {precision: built("moe-tiny", precision) for precision in ("fp32", "bf16")}


def test_entries_that_train_are_captured(moe: dict[str, Module]) -> None:
    report = Report()
    module = CudaGraphs().run(moe["bf16"], report)
    captured = {entry.name: entry.captured for entry in module.entries.values()}
    assert captured == {"microbatch": True, "evaluate": False, "predict": False, "finish": True}
    assert report.near_misses == [] and len(report.matches) == 2
    text = print_module(module)
    assert "entry finish = @finish" in text and text.count(" captured\n") == 2
    assert parse_module(text).entries == module.entries


def test_what_reads_on_the_host_is_not(moe: dict[str, Module]) -> None:
    report = Report()
    wide = moe["fp32"]
    assert CudaGraphs().run(wide, Report()).entries["microbatch"].captured, "a kernel multiplies all groups at once"
    module = CudaGraphs().run(parse_module(print_module(wide).replace("f32", "f64")), report)
    assert not module.entries["microbatch"].captured and module.entries["finish"].captured
    (miss,) = report.near_misses
    assert any(miss.node == node.id for node in module.functions[miss.function].nodes)
    assert "grouped_matmul at models/experts.py" in miss.detail and "on the host" in miss.detail


def test_lists_of_new_tensors_keep_finish_from_it() -> None:
    """Where ranks share the optimizer's state alone, gradients of a step are new tensors."""
    module = build_module(Recipe(model="dense-tiny", mesh="fsdp=2", zero=1, target="cpu")).module
    report = Report()
    after = CudaGraphs().run(module, report)
    assert after.entries["microbatch"].captured and not after.entries["finish"].captured
    (miss,) = report.near_misses
    assert "takes new tensors" in miss.detail


GROUPED = """
func @f(%rows: bf16[B, 16], %w: bf16[4, 16, N], %offsets: i32[4]) {
  %y: bf16[B, N] = grouped_matmul(%rows, %w, %offsets)
  return %y
}
"""


@pytest.mark.parametrize(
    ("dtype", "width", "found"),
    [("bf16", 24, False), ("bf16", 100, True), ("f32", 32, False), ("f32", 24, True), ("f64", 32, True)],
)
def test_groups_that_nothing_multiplies_at_once(dtype: str, width: int, found: bool) -> None:
    function = module_of(GROUPED.replace("bf16", dtype).replace("N", str(width))).functions["f"]
    assert (_obstacle(function, function.nodes[0]) is not None) is found
