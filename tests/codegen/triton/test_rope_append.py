"""QK-norm, rotation and append in one: the kernel in Triton's interpreter and the twin against the op in f64."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
import torch

from mgraph.codegen.triton import RmsNorm, reference_text, rope_append
from mgraph.codegen.triton.rope_append import RopeAppend
from mgraph.ir.opdef import op_def
from mgraph.runtime.kernels import DTYPES
from tests.codegen.triton.interpret_cases import BROKEN_INTERPRETER, Case, interpret
from tests.passes.raising import module_of

PROBLEMS = {
    "plain": RopeAppend("f32", "f32", 4, 2, 16, 16, 16),
    "narrow": RopeAppend("f32", "f32", 12, 3, 24, 24, 12),
    "pairs": RopeAppend("f32", "f32", 4, 4, 8, 8, 8, "interleaved", RmsNorm(8, "f32", "f32", 1e-5, "normed", 1.0)),
    "normed": RopeAppend("f16", "f32", 8, 2, 32, 32, 32, norm=RmsNorm(32, "f16", "f16", 1e-6)),
    "brain": RopeAppend("bf16", "f32", 8, 2, 32, 32, 32, norm=RmsNorm(32, "bf16", "bf16", 1e-6)),
    "brain_pairs": RopeAppend("bf16", "bf16", 3, 1, 16, 16, 8, "interleaved"),
}
TOKENS = 5


def given(problem: RopeAppend) -> tuple[torch.Tensor, ...]:
    """Inputs of a site; queries, keys and values are parts of one product."""
    source, dtype = torch.Generator().manual_seed(7), DTYPES[problem.dtype]
    caches = torch.zeros(2, 12, problem.groups, problem.width).to(dtype)
    joined = torch.randn(TOKENS, problem.heads + 2 * problem.groups, problem.width, generator=source).to(dtype)
    q, k, v = joined.split([problem.heads, problem.groups, problem.groups], 1)
    slots = torch.tensor([9, 2, 11, 5, 0])
    tables = torch.randn(2, TOKENS, problem.table_width, generator=source).to(DTYPES[problem.table])
    weights = (
        tuple((torch.rand(2, problem.width, generator=source) + 0.5).to(DTYPES[problem.norm.weight]))
        if problem.norm
        else ()
    )
    return caches[0], caches[1], q, k, v, slots, tables[0], tables[1], *weights


def exact(problem: RopeAppend, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Keys, values and queries in f64."""
    norm = problem.norm
    options = {} if norm is None else {"eps": norm.eps, "offset": norm.offset, "round": norm.round}
    wide = [t.double() if t.is_floating_point() else t for t in inputs]
    made: tuple[torch.Tensor, ...] = op_def("rope_kv_append").body(*wide, style=problem.style, **options)
    return made


def check(problem: RopeAppend, found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> None:
    """Errors in the norm, relative: the interpreter cuts to bf16 where a GPU rounds."""
    bound = {"f32": 1e-6, "f16": 1.5e-3, "bf16": 1.2e-2}[problem.dtype]
    for made, right in zip(found, wanted, strict=True):
        assert made.dtype is DTYPES[problem.dtype]
        assert float((made.double() - right).norm() / right.norm()) < bound


@pytest.mark.parametrize("name", PROBLEMS)
def test_twins(name: str) -> None:
    problem = PROBLEMS[name]
    twins = types.ModuleType("twins")
    exec(reference_text([rope_append.append("append", problem)]), twins.__dict__)
    inputs = given(problem)
    wanted = exact(problem, inputs)
    turned = twins.append(*inputs)
    check(problem, (inputs[0], inputs[1], turned), wanted)


@pytest.mark.skipif(BROKEN_INTERPRETER, reason="the interpreter cannot run with this NumPy")
def test_kernels_in_the_interpreter(tmp_path: Path) -> None:
    specs = [rope_append.append(name, problem) for name, problem in PROBLEMS.items()]
    cases: list[Case] = [(name, given(problem)) for name, problem in PROBLEMS.items()]
    for (name, inputs), ((turned, *_), after) in zip(cases, interpret(specs, cases, tmp_path), strict=True):
        check(PROBLEMS[name], (after[0], after[1], turned), exact(PROBLEMS[name], inputs))


GRAPH = """
func @f(%c: bf16[16*B, 2, 64], %q: bf16[S, 8, 64], %k: bf16[S, 2, 64], %slots: i64[S], %t: f32[S, 64], %w: bf16[64]) {
  %a: bf16[16*B, 2, 64], %b: bf16[16*B, 2, 64], %y: bf16[S, 8, 64] = rope_kv_append(%c, %c, %q, %k, %k, %slots, %t, %t, %w, %w) {eps = 1e-06}
  return %a, %b, %y
}
"""  # noqa: E501


def test_problem_of_a_node() -> None:
    (node,) = module_of(GRAPH).functions["f"].nodes
    norm = RmsNorm(64, "bf16", "bf16", 1e-6)
    assert rope_append.problem_of(node) == RopeAppend("bf16", "f32", 8, 2, 64, 64, 64, norm=norm)
    mixed = module_of(
        GRAPH.replace("%c: bf16", "%c: f32").replace("%a: bf16", "%a: f32").replace("%b: bf16", "%b: f32")
    )
    assert "the cache f32" in str(rope_append.problem_of(mixed.functions["f"].nodes[0]))


def test_where_norms_may_lie_unevenly_there_is_one_binary() -> None:
    """Tables of 8 numbers begin evenly where there is one token, and not where there are two."""
    uneven = rope_append.fixed("append", PROBLEMS["pairs"]).launches
    assert [launch.aligned for launch in uneven] == [False]
    for name in ("normed", "plain"):
        assert rope_append.fixed("append", PROBLEMS[name]) == rope_append.append("append", PROBLEMS[name])
