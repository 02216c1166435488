"""Heads beside each other: the kernel in Triton's interpreter against rotations in float64, and what is refused."""

from __future__ import annotations

import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mgraph.codegen.triton import reference_text, rope_join
from mgraph.codegen.triton.rope import Rope, Tuning
from mgraph.codegen.triton.rope_join import RopeJoin, RopeJoined
from mgraph.ir.graph import Node
from tests.codegen.triton.interpret_cases import BROKEN_INTERPRETER, Case, interpret
from tests.codegen.triton.test_rope import BHS, DTYPES, exact
from tests.passes.raising import module_of

PROBLEMS: dict[str, tuple[RopeJoin, Tuning | None]] = {
    "plain": (RopeJoin(Rope("f32", "f32", 16, 16, BHS, ("", "S"), 4, inverse=True), (4, 2, 2)), None),
    "ragged": (RopeJoin(Rope("f32", "f32", 10, 10, BHS, ("B", "", "S"), 5), (5, 3, 1)), Tuning(4, 2)),
    "narrow": (RopeJoin(Rope("f32", "f32", 16, 8, BHS, ("S",), 3, inverse=True), (3, 3, 3)), Tuning(2, 2)),
    "neighbours": (
        RopeJoin(Rope("f32", "f32", 6, 6, BHS, ("", "S"), 6, "interleaved", inverse=True), (6, 2, 2)),
        Tuning(2, 4),
    ),
    "brain": (RopeJoin(Rope("bf16", "bf16", 32, 32, BHS, ("", "S"), 4, inverse=True), (4, 2, 2)), None),
    "half": (RopeJoin(Rope("f16", "f32", 16, 8, BHS, ("", "", "S"), 2), (2, 1, 1)), Tuning(4, 1)),
}


def draw(problem: RopeJoin, batch: int, length: int) -> tuple[torch.Tensor, ...]:
    """q contiguous, k as attention's backward leaves it, v a part of something wider; and the tables."""
    generator = torch.Generator().manual_seed(batch + length)
    rope, dtype = problem.rope, DTYPES[problem.rope.x]

    def one(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    q = one(batch, problem.heads[0], length, rope.width).to(dtype)
    k = one(batch, length, problem.heads[1], rope.width).to(dtype).transpose(1, 2)
    v = one(batch, length, problem.heads[2], 2 * rope.width).to(dtype).transpose(1, 2)[..., : rope.width]
    sizes = {"B": batch, "S": length, "": 1}
    tables = [one(*(sizes[axis] for axis in rope.table_axes), rope.table_width).to(DTYPES[rope.table]) for _ in "cs"]
    return q, k, v, *tables


def wanted(problem: RopeJoin, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *tables: torch.Tensor) -> torch.Tensor:
    parts = [exact(problem.rope, x, *tables) for x in (q, k)]
    return torch.cat([x.transpose(1, 2).flatten(2) for x in (*parts, v.double())], -1)


def turned(problem: RopeJoin, cut: Tuning | None) -> tuple[RopeJoined, Tuning | None]:
    """The first two of the three, where all lie beside each other."""
    heads = sum(problem.heads[:2])
    return RopeJoined(replace(problem.rope, heads=heads), heads, problem.width), cut


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.shape == want.shape
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.skipif(BROKEN_INTERPRETER, reason="the interpreter of Triton before 3.7 makes numbers of arrays")
def test_kernel_in_the_interpreter(tmp_path: Path) -> None:
    specs = [rope_join.join(name, problem, cut) for name, (problem, cut) in PROBLEMS.items()]
    specs += [rope_join.turn(f"{name}_turn", *turned(problem, cut)) for name, (problem, cut) in PROBLEMS.items()]
    cases: list[Case] = [
        (name, draw(problem, *size)) for name, (problem, _) in PROBLEMS.items() for size in ((2, 3), (1, 9))
    ]
    for name, (problem, _) in PROBLEMS.items():
        q, k, v, *tables = draw(problem, 2, 3)
        whole = torch.cat([x.transpose(1, 2).flatten(2) for x in (q, k, v)], -1)
        cases.append((f"{name}_turn", (whole, *tables)))
    for (name, inputs), (got, after) in zip(cases, interpret(specs, cases, tmp_path), strict=True):
        if name.endswith("_turn"):
            problem = PROBLEMS[name.removesuffix("_turn")][0]
            assert torch.equal(after[0], got[0]), "it is written in place"
            bound = {"f32": 1e-6, "f16": 1e-3, "bf16": 8e-3}[problem.rope.x]
            assert error(got[0], wanted(problem, *draw(problem, 2, 3))) <= bound, name
            continue
        problem = PROBLEMS[name][0]
        assert got[0].is_contiguous() and got[0].dtype is DTYPES[problem.rope.x]
        bound = {"f32": 1e-6, "f16": 1e-3, "bf16": 8e-3}[problem.rope.x]
        assert error(got[0], wanted(problem, *inputs)) <= bound, name
        # What does not turn is as it was.
        v = inputs[2].transpose(1, 2).flatten(2)
        assert torch.equal(got[0][..., -v.shape[-1] :], v), name


@pytest.mark.parametrize("name", PROBLEMS)
def test_twin(name: str) -> None:
    problem = PROBLEMS[name][0]
    module = types.ModuleType("twins")
    specs = [rope_join.join("join", problem), rope_join.turn("turn", *turned(problem, None))]
    exec(reference_text(specs), module.__dict__)
    inputs = draw(problem, 2, 3)
    bound = {"f32": 1e-6, "f16": 1e-3, "bf16": 1e-2}[problem.rope.x]
    assert error(module.join(*inputs), wanted(problem, *inputs)) <= bound
    whole = torch.cat([x.transpose(1, 2).flatten(2) for x in inputs[:3]], -1)
    assert error(module.turn(whole, *inputs[3:]), wanted(problem, *inputs)) <= bound


TEXT = """
func @f(%q: bf16[B, 4, S, 16], %k: bf16[B, 2, S, 16], %v: bf16[B, 2, S, 16], %c: bf16[1, S, 16], %s: bf16[1, S, 16]) {
  %y: bf16[B, S, 128] = rope_join(%q, %k, %v, %c, %s) {inverse = true}
  return %y
}
"""


def node(text: str = TEXT) -> Node:
    return module_of(text).functions["f"].nodes[0]


def test_instances() -> None:
    problem = rope_join.problem_of(node())
    assert problem == RopeJoin(Rope("bf16", "bf16", 16, 16, BHS, ("", "S"), 4, inverse=True), (4, 2, 2))
    assert rope_join.tuning(problem) == Tuning(64, 2)
    tables = TEXT.replace("%c: bf16[1, S, 16], %s: bf16[1, S, 16]", "%c: bf16[B, 4, S, 16], %s: bf16[B, 4, S, 16]")
    assert "differs in every row" in str(rope_join.problem_of(node(tables)))
    other = TEXT.replace("%v: bf16", "%v: f32")
    assert "differ in dtype" in str(rope_join.problem_of(node(other)))


TURNED = """
func @f(%x: bf16[B, S, 128], %c: bf16[1, S, 16], %s: bf16[1, S, 16]) {
  %y: bf16[B, S, 128] = rope_joined(%x, %c, %s) {heads = 6, width = 16}
  return %y
}
"""


def test_instances_that_turn() -> None:
    problem = rope_join.turn_problem_of(node(TURNED))
    assert problem == RopeJoined(Rope("bf16", "bf16", 16, 16, BHS, ("", "S"), 6), 6, 128)
    tables = TURNED.replace("%c: bf16[1, S, 16], %s: bf16[1, S, 16]", "%c: bf16[B, 6, S, 16], %s: bf16[B, 6, S, 16]")
    assert "differs in every row" in str(rope_join.turn_problem_of(node(tables)))
