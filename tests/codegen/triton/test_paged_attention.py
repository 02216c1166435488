"""Attention over a paged cache: kernels in Triton's interpreter and twins against loops over positions in f64."""

from __future__ import annotations

import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mgraph.codegen.triton import paged_attention, reference_text
from mgraph.codegen.triton.aot import ROOMY, without_large
from mgraph.codegen.triton.paged_attention import PagedAttention, Tuning
from mgraph.runtime.kernels import DTYPES, evaluate
from tests.codegen.triton.interpret_cases import BROKEN_INTERPRETER, Case, interpret
from tests.ir.ops.paged_cases import MIXED, Ragged, expected, ragged
from tests.passes.raising import module_of

SCALE = 0.3


def both(single: Tuning, chunk: Tuning) -> dict[str, Tuning]:
    """The ways that every problem has."""
    return {"single": single, "chunk": chunk}


PROBLEMS: dict[str, tuple[PagedAttention, dict[str, Tuning] | None]] = {
    "plain": (PagedAttention("f32", 4, 2, 8, 8, 4, SCALE), None),
    "one_group": (PagedAttention("f32", 3, 1, 24, 24, 1, SCALE), both(Tuning(16, 16), Tuning(32, 16))),
    "window": (PagedAttention("f32", 4, 4, 16, 16, 16, SCALE, window=6), both(Tuning(16, 16), Tuning(16, 16))),
    "everything": (PagedAttention("f32", 4, 2, 8, 8, 4, SCALE, 7, 1.5, "f32"), both(Tuning(16, 32), Tuning(32, 16))),
    "wide_window": (PagedAttention("f32", 4, 2, 8, 8, 4, SCALE, window=66), both(Tuning(16, 16), Tuning(16, 16))),
    "half": (PagedAttention("f16", 8, 2, 32, 32, 4, SCALE, sinks="f16"), None),
    "brain": (PagedAttention("bf16", 8, 2, 32, 32, 4, SCALE, sinks="bf16"), None),
    "long": (PagedAttention("f16", 4, 1, 16, 16, 4, SCALE), None),
    "brain_long": (PagedAttention("bf16", 4, 1, 16, 16, 4, SCALE, window=9), None),
    "fixed": (PagedAttention("f32", 4, 2, 8, 8, 4, SCALE, 0, 1.5, run=256), {"fixed": Tuning(16, 16)}),
    "fixed_half": (PagedAttention("f16", 4, 1, 16, 16, 8, SCALE, 9, sinks="f16", run=256), {"fixed": Tuning(64, 16)}),
}
BOUNDS = {"f32": 2e-6, "f16": 3e-3, "bf16": 1.2e-2}
"""Largest errors, relative: the interpreter cuts to bf16 where a GPU rounds."""
BATCHES = {
    "mixed": (MIXED, (2, 1), 1024),
    "mixed, one run": (MIXED, (9, 2), 0),
    "single": ([(1, 40), (1, 1), (1, 9)], (0, 0), 1024),
    "single, one run": ([(1, 40), (1, 1), (1, 9)], (3, 2), 0),
    "one": ([(1, 70)], (0, 0), 1024),
    "many runs": ([(1, 180)], (0, 0), 1024),
    "padding": ([(1, 3)], (3, 3), 1024),
    "long table": ([(1, 300)], (0, 0), 4096),
    "long tables": ([(1, 300), (1, 1)], (1, 1), 4096),
}
"""Requests, padding, and for how many rows each table is: wide ones give several runs of keys on three
multiprocessors, which the interpreter has."""
FEW = {
    "one_group": ("mixed, one run", "single", "one", "many runs"),
    "window": ("mixed", "single, one run"),
    "half": ("mixed", "single, one run", "padding"),
    "brain": ("mixed", "single, one run"),
    "wide_window": ("mixed", "one"),
    "long": ("one", "long table", "long tables"),
    "brain_long": ("long table",),
    "plain": tuple(batch for batch in BATCHES if "long" not in batch),
    "everything": tuple(batch for batch in BATCHES if "long" not in batch),
    "fixed": ("mixed", "padding"),
    "fixed_half": ("mixed", "padding"),
}
"""What the interpreter, which is slow, runs of problems that are much like others."""


def given(problem: PagedAttention, batch: str) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Inputs of a site, of which nothing that is not read is a number, and what it gives. What no new token's window
    reaches has left the tables, too."""
    requests, padding, rows = BATCHES[batch]
    sizes = {"heads": problem.heads, "groups": problem.groups, "width": problem.width}
    dtype = DTYPES[problem.dtype]
    table = -(-rows // problem.block_size)
    made = ragged(requests, **sizes, block_size=problem.block_size, padding=padding, table=table, dtype=dtype)
    sinks = torch.linspace(-1, 2, problem.heads).to(dtype) if problem.sinks else None
    wanted = expected(made, SCALE, problem.window or None, problem.softcap or None, sinks)
    if problem.window:
        without_what_has_passed(made, problem.window)
    return (*made.operands, *([] if sinks is None else [sinks])), wanted


def without_what_has_passed(made: Ragged, window: int) -> None:
    """Rows before all windows become NaN, and blocks of such rows alone are block 0 in the tables."""
    for request, length in enumerate(made.lengths.tolist()):
        new = int(made.starts[request + 1] - made.starts[request])
        passed = max(0, length - new + 1 - window)
        table, size = made.blocks[request], made.block_size
        places = torch.arange(passed)
        rows = table[places // size].long() * size + places % size
        made.keys[rows], made.values[rows] = float("nan"), float("nan")
        table[: passed // size] = 0


@pytest.mark.parametrize("name", PROBLEMS)
def test_twins(name: str) -> None:
    problem = PROBLEMS[name][0]
    twins = types.ModuleType("twins")
    exec(reference_text([paged_attention.forward("attend", problem)]), twins.__dict__)
    for batch in BATCHES:
        inputs, wanted = given(problem, batch)
        assert float((twins.attend(*inputs).double() - wanted).abs().max()) < BOUNDS[problem.dtype] * 10


@pytest.mark.skipif(BROKEN_INTERPRETER, reason="the interpreter cannot run with this NumPy")
@pytest.mark.parametrize("few", [FEW, pytest.param({}, marks=pytest.mark.full)], ids=["few", "all"])
def test_kernels_in_the_interpreter(few: dict[str, tuple[str, ...]], tmp_path: Path) -> None:
    """Single tokens, chunks and padding, with one and with several splits, through the runtime's call path."""
    specs = [paged_attention.forward(name, problem, cut) for name, (problem, cut) in PROBLEMS.items()]
    cases: list[Case] = []
    wanted = []
    for name, (problem, _) in PROBLEMS.items():
        for batch in few.get(name, BATCHES):
            inputs, exact = given(problem, batch)
            cases.append((name, inputs))
            wanted.append(exact)
    for (name, _), ((out, *_), _), exact in zip(cases, interpret(specs, cases, tmp_path), wanted, strict=True):
        dtype = PROBLEMS[name][0].dtype
        assert out.dtype is DTYPES[dtype]
        assert float((out.double() - exact).norm() / exact.norm()) < BOUNDS[dtype], name


@pytest.mark.skipif(BROKEN_INTERPRETER, reason="the interpreter cannot run with this NumPy")
@pytest.mark.parametrize("name", ["fixed", "fixed_half"])
def test_with_fixed_runs_a_token_is_the_same_in_every_chunk(name: str, tmp_path: Path) -> None:
    """Chunks of one sequence, several as requests of one step, bit by bit against the whole; with runs of 16."""
    problem, cuts = PROBLEMS[name]
    problem, length = replace(problem, heads=2, groups=1, run=16), 41
    sizes = {"heads": 2, "groups": 1, "width": problem.width}
    made = ragged([(length, length)], **sizes, block_size=problem.block_size, padding=(0, 0), dtype=torch.float32)
    kind = DTYPES[problem.dtype]
    q, keys, values = (t.to(kind) for t in (made.q, made.keys, made.values))
    sinks = (torch.linspace(-1, 2, problem.heads).to(kind),) if problem.sinks else ()
    steps = [[(0, length)], [(40, 41), (0, 17)], [(17, 40), (3, 4)], [(31, 32)]]
    cases: list[Case] = []
    for chunks in steps:
        starts = torch.tensor([0, *(end - begin for begin, end in chunks)]).cumsum(0).int()
        tables = made.blocks.expand(len(chunks), -1).contiguous()
        tokens = torch.cat([q[begin:end] for begin, end in chunks])
        lengths = torch.tensor([end for _, end in chunks], dtype=torch.int32)
        cases.append(("attend", (tokens, keys, values, starts, lengths, tables, *sinks)))
    site = paged_attention.forward("attend", problem, cuts)
    found = [results[0] for results, _ in interpret([site], cases, tmp_path)]
    for chunks, out in zip(steps, found, strict=True):
        assert torch.equal(out, torch.cat([found[0][begin:end] for begin, end in chunks])), chunks


@pytest.mark.parametrize(
    ("tokens", "requests", "rows", "way", "splits", "join"),
    [
        (1, 1, 512, "single", 8, "few"),
        (1, 1, 1024, "single", 16, "some"),
        (1, 1, 4096, "long", 16, "some"),
        (16, 16, 1024, "long", 1, ""),
        (4, 4, 512, "single", 8, "few"),
        (6, 6, 2048, "long", 2, "few"),
        (6, 6, 4096, "single", 22, "many"),
        (9, 9, 512, "long", 1, ""),
        (9, 9, 1024, "single", 7, "few"),
        (12, 12, 1024, "long", 1, ""),
        (8, 8, 4096, "long", 2, "few"),
        (12, 12, 2048, "single", 11, "some"),
        (14, 14, 4096, "single", 9, "some"),
        (16, 16, 4096, "single", 8, "few"),
        (17, 17, 1024, "single", 3, "few"),
        (17, 17, 4096, "single", 7, "few"),
        (64, 64, 1024, "single", 1, ""),
        (64, 64, 8192, "single", 2, "few"),
        (128, 128, 2048, "single", 1, ""),
        (3, 1, 65536, "chunk", 33, "many"),
        (4096, 2, 65536, "chunk", 1, ""),
    ],
)
def test_ways(tokens: int, requests: int, rows: int, way: str, splits: int, join: str) -> None:
    """One way and at most one join, of an H200's multiprocessors; and what is launched then has programs. Several
    requests whose tables are wide have runs for two rounds of programs."""
    site = paged_attention.forward("attend", PagedAttention("bf16", 32, 8, 128, 128, 16, SCALE))
    dims = {"T": tokens, "R": requests, "W": rows // 16, "sms": 132}
    for name, size in site.dims.items():
        dims[name] = evaluate(size, dims)
    names = ("single", "long", "chunk", "few", "some", "many")
    assert {name: dims[name] for name in names} == {name: int(name in (way, join)) for name in names}
    assert (dims["splits"], dims["parts"]) == (splits, splits if join else 0)
    launched = [launch.function for launch in site.launches if evaluate(launch.when, dims)]
    assert launched == [f"attend_{name}" for name in (way, join) if name]


def test_gpus_with_less_shared_memory_have_no_long_way() -> None:
    """A package for one that may be such a GPU, of whatever else; with none, the kernels are sources alone."""
    site = paged_attention.forward("attend", PagedAttention("bf16", 32, 8, 128, 128, 16, SCALE))
    for archs, way in (([], "long"), (["sm_90a"], "long"), (["sm_120a"], "single"), (["sm_80", "sm_90a"], "single")):
        left = site if all(ROOMY.fullmatch(arch) for arch in archs) else without_large(site)
        dims = {"T": 1, "R": 1, "W": 512, "sms": 132}
        for name, size in left.dims.items():
            dims[name] = evaluate(size, dims)
        launched = [launch.function for launch in left.launches if evaluate(launch.when, dims)]
        assert launched[0] == f"attend_{way}" and len(launched) == 2


GRAPH = """
func @f(%q: bf16[S, 8, 64], %k: bf16[16*B, 2, 64], %starts: i32[7], %lengths: i32[6], %blocks: i32[6, 4]) {
  %out: bf16[S, 8, 64] = paged_attention(%q, %k, %k, %starts, %lengths, %blocks) {block_size = 16, scale = 0.125}
  return %out
}
"""


def test_problem_of_a_node() -> None:
    (node,) = module_of(GRAPH).functions["f"].nodes
    assert node.op == "paged_attention"
    assert paged_attention.problem_of(node) == PagedAttention("bf16", 8, 2, 64, 64, 16, 0.125)
    assert paged_attention.tunings(PagedAttention("bf16", 8, 2, 64, 64, 16, 0.125))["single"] == Tuning(
        16, 64, most_registers=128
    )
    fixed = PagedAttention("bf16", 8, 2, 64, 64, 16, 0.125, run=256)
    assert paged_attention.fixed_problem_of(node) == fixed
    mixed = module_of(GRAPH.replace("%k: bf16", "%k: f32")).functions["f"].nodes[0]
    assert "the cache f32" in str(paged_attention.problem_of(mixed))
