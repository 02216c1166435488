"""cuda-graphs: what is captured, and what keeps an entry from it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from mgraph.codegen.manifest import _entries
from mgraph.codegen.step import step_text
from mgraph.compiler import build_module
from mgraph.ir.collective_proof import prove
from mgraph.ir.dims import symbol
from mgraph.ir.graph import Module, StateKind
from mgraph.ir.local import Division, declared_sizes
from mgraph.ir.parser import parse_module
from mgraph.ir.printer import print_module
from mgraph.ir.torch_bridge import torch_dtype_name
from mgraph.ir.verifier import verify
from mgraph.passes.base import Report
from mgraph.passes.calls import callee, calls
from mgraph.passes.cuda_graphs import CudaGraphs
from mgraph.passes.pieces import _shape
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
    assert [miss.pattern for miss in report.near_misses] == ["layer.fwd", "layer.bwd", "microbatch"]
    for miss in report.near_misses:
        assert any(miss.node == node.id for node in wide.functions[miss.function].nodes)
        assert "grouped_matmul at models/experts.py" in miss.detail and "on the host" in miss.detail
    assert module.entries["microbatch"].pieces == ("layer.fwd.part1", "layer.bwd.part1")


_EXPERTS = ("expert_", "gathered_outer", "grouped_")


def _run_by(module: Module, names: Iterable[str]) -> set[str]:
    """The ops of functions and of what they call."""
    functions = [module.functions[name] for name in names]
    inner = [callee(node) for function in functions for node in calls(function)]
    return {node.op for f in functions for node in f.nodes} | (_run_by(module, inner) if inner else set())


@pytest.mark.parametrize(
    ("family", "sizes", "at_once"),
    [
        ("moe", "d_ff=32", True),
        ("moe", "d_ff=24", True),  # torch's product of bf16 takes it
        ("moe", "d_ff=20", False),
        ("moe", "d_model=40, d_ff=7, top_k=3, shared_d_ff=5", False),
        ("gpt-oss", "d_ff=20", False),  # sums of groups for biases
    ],
)
def test_what_reads_on_the_host_is_no_graph_when_fused(family: str, sizes: str, at_once: bool, tmp_path: Path) -> None:
    file = tmp_path / "odd.py"
    file.write_text(f"from mgraph import models\ndef odd():\n    return models.get({family!r}, 'tiny', {sizes})\n")
    module = build_module(Recipe(model=f"{file}:odd", precision="bf16")).module
    entry = module.entries["microbatch"]
    ops = _run_by(module, [entry.function])
    expected = {"expert_glu", "expert_glu_grad", "gathered_outer"} if family == "moe" else {"grouped_sum"}
    assert expected <= ops
    assert entry.captured == at_once
    if not at_once:
        assert entry.pieces and not [op for op in _run_by(module, entry.pieces) if op.startswith(_EXPERTS)]


def test_layers_are_graphs_where_asked_for(moe: dict[str, Module]) -> None:
    report = Report()
    module = CudaGraphs(layers=True).run(moe["bf16"], report)
    entries = module.entries
    assert {name: entry.captured for name, entry in entries.items()} == {
        "microbatch": False, "evaluate": False, "predict": False, "finish": True
    }  # fmt: skip
    assert {entry.name: entry.pieces for entry in entries.values() if entry.pieces} == {
        "microbatch": ("layer.fwd", "layer.bwd")
    }
    assert report.near_misses == [] and len(report.matches) == 3
    assert module.functions == moe["bf16"].functions
    assert parse_module(print_module(module)).entries == entries
    told = {name: entry.get("pieces") for name, entry in _entries(module).items() if "pieces" in entry}
    assert told == {"microbatch": ["layer_fwd", "layer_bwd"]}
    assert step_text(module).count('"""layers.*, a CUDA graph: ') == 2


def test_what_the_host_reads_is_between_graphs() -> None:
    """Rows of experts have an extent that the host has read; what is before and after are graphs."""
    recipe = Recipe(
        model="moe-tiny", mesh="ep=2", expert_extent="host", precision="bf16", arch="none", disable="raise-norm"
    )
    before, report = build_module(recipe).module, Report()
    module = CudaGraphs().run(before, report)
    verify(module)
    prove(module)
    assert module.entries["finish"].captured
    assert module.entries["microbatch"].pieces == ("layer.fwd.part1", "layer.bwd.part1", "layer.bwd.part2")
    for name in module.entries["microbatch"].pieces:
        shapes = {dim for node in module.functions[name].nodes for v in node.operands for dim in _shape(v)}
        assert not shapes & {symbol("R"), symbol("R_sent"), 2 * symbol("R")}
    assert [(miss.function, miss.pattern) for miss in report.near_misses] == [
        ("layer.fwd", "layer.fwd"), ("layer.bwd", "layer.bwd"), ("layer.fwd", "microbatch")
    ]  # fmt: skip
    assert "1 graph, and" in report.near_misses[0].detail and "read_sizes at" in report.near_misses[0].detail
    assert "(R_sent)" in report.near_misses[1].detail
    states = [_after_a_step(of) for of in (before, module)]
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    assert all(tensor.any() for name, tensor in states[0].items() if name.endswith(".grad"))


def _after_a_step(module: Module) -> dict[str, torch.Tensor]:
    """The state after a microbatch of one of two ranks, to which the other sends what it is sent."""
    names: dict[str, Any] = {"__file__": "step.py", "__name__": "step"}
    exec(compile(step_text(module), "step.py", "exec"), names)
    division, generator = Division.of(module, declared_sizes(module)), torch.Generator().manual_seed(0)
    state = {}
    for name, declared in module.state.items():
        shape = [int(extent) for extent in division.local_type(declared.type).shape]
        drawn = torch.randn(shape, generator=generator) * 0.1
        zero = declared.kind in (StateKind.GRAD, StateKind.SCALAR)
        state[name] = (drawn * (not zero)).to(getattr(torch, torch_dtype_name(declared.type.dtype)))
    tokens = torch.randint(256, (2, 17), generator=generator)
    names["microbatch"](state, tokens[:, :-1], tokens[:, 1:])
    return state


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
    module = module_of(GROUPED.replace("bf16", dtype).replace("N", str(width)))
    assert ("f" in CudaGraphs()._one_by_one(module)) is found
