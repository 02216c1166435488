"""Rotary embedding: the kernels in Triton's interpreter against the complex product in float64, and what is refused."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from mgraph.codegen.triton import kernels_text, reference_text, rope
from mgraph.codegen.triton.rope import Rope, Tuning
from mgraph.ir.graph import Node
from tests.codegen.triton.interpret_cases import BROKEN_INTERPRETER, Case, interpret
from tests.passes.raising import module_of

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
BHS, BSH = ("B", "H", "S"), ("B", "S", "H")

PROBLEMS: dict[str, tuple[Rope, Tuning | None]] = {
    "plain": (Rope("f32", "f32", 16, 16, BHS, ("", "S"), 4), None),
    "narrow": (Rope("f32", "f32", 16, 8, BHS, ("S",), 3, inverse=True), Tuning(2, 2)),
    "ragged": (Rope("f32", "f32", 10, 10, BHS, ("B", "", "S"), 5), Tuning(4, 2)),
    "ragged_pairs": (Rope("f32", "f32", 10, 5, BHS, ("", "", "S"), 7, "interleaved"), Tuning(1, 8)),
    "neighbours": (Rope("f32", "f32", 16, 16, BSH, ("S", ""), 4, "interleaved", inverse=True), Tuning(2, 4)),
    "neighbours_ragged": (Rope("f32", "f32", 6, 6, BSH, ("B", "S", ""), 3, "interleaved"), Tuning(2, 2)),
    "same": (Rope("f32", "f32", 8, 4, BHS, ("B", "", ""), 3), Tuning(2, 2)),
    "constant": (Rope("f32", "f32", 8, 8, ("S", "H"), ("",), 3, "interleaved"), Tuning(2, 2)),
    "rows": (Rope("f32", "f32", 12, 6, ("H",), (), 0), None),
    "packed": (Rope("f32", "f32", 12, 12, ("S", "H"), ("S", ""), 0, inverse=True), None),
    "half": (Rope("f16", "f32", 16, 16, BHS, ("S",), 4), Tuning(4, 4)),
    "brain": (Rope("bf16", "bf16", 16, 8, BHS, ("", "S"), 2, "interleaved"), Tuning(4, 2)),
    "brain_wide": (Rope("bf16", "f32", 32, 32, BHS, ("", "S"), 2, inverse=True), Tuning(8, 1)),
}
SIZES = [{"B": 1, "S": 1, "H": 1}, {"B": 2, "S": 3, "H": 3}, {"B": 1, "S": 5, "H": 9}]


def exact(problem: Rope, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The map as a matrix for each row, in float64: rows of `[[cos_a, -sin_a], [sin_b, cos_b]]` for each pair."""
    width = problem.width
    a = torch.arange(width // 2) * (2 if problem.style == "interleaved" else 1)
    b = a + (1 if problem.style == "interleaved" else width // 2)
    x, cos, sin = x.double(), cos.double(), sin.double()
    narrow = problem.table_width == width // 2
    cos_a, cos_b, sin_a, sin_b = (
        (cos, cos, sin, sin) if narrow else (cos[..., a], cos[..., b], sin[..., a], sin[..., b])
    )
    matrix = torch.zeros(*cos.shape[:-1], width, width, dtype=torch.float64)
    matrix[..., a, a], matrix[..., a, b] = cos_a, -sin_a
    matrix[..., b, b], matrix[..., b, a] = cos_b, sin_b
    turned = matrix.mT if problem.inverse else matrix
    return (turned @ x.unsqueeze(-1)).squeeze(-1)


def draw(problem: Rope, sizes: dict[str, int], layout: str) -> tuple[torch.Tensor, ...]:
    """Random x, cos and sin. `layout`: x contiguous, as a permuted projection, or a part of something wider."""
    generator = torch.Generator().manual_seed(sizes["S"] * 8 + problem.width)
    shape = [sizes[axis] for axis in problem.axes]
    x = torch.randn(*shape, problem.width, generator=generator)
    if layout == "permuted" and len(shape) == 3:
        x = torch.randn(shape[0], shape[2], shape[1], problem.width, generator=generator).permute(0, 2, 1, 3)
    if layout == "part":
        x = torch.randn(*shape, 3 * problem.width, generator=generator)[..., problem.width : 2 * problem.width]
    table = [sizes[axis] if axis else 1 for axis in problem.table_axes]
    cos, sin = (torch.randn(*table, problem.table_width, generator=generator) for _ in range(2))
    # `to` keeps gaps only where nothing is converted: a part is made in the dtype.
    if layout == "part":
        whole = torch.empty(*shape, 2 * problem.width, dtype=DTYPES[problem.x])
        x = whole[..., : problem.width].copy_(x)
    return x.to(DTYPES[problem.x]), cos.to(DTYPES[problem.table]), sin.to(DTYPES[problem.table])


@pytest.mark.skipif(
    BROKEN_INTERPRETER,
    reason="the interpreter of Triton before 3.7 makes numbers of arrays with a dim, which NumPy 2.5 no longer does",
)
def test_kernels_in_the_interpreter(tmp_path: Path) -> None:
    """Both styles, all table forms, ragged sizes and layouts of x, against float64; y lies as x does."""
    specs = [rope.rotate(name, problem, cut) for name, (problem, cut) in PROBLEMS.items()]
    cases: list[Case] = [
        (name, draw(problem, sizes, layout))
        for name, (problem, _) in PROBLEMS.items()
        for sizes, layout in zip(SIZES, ("contiguous", "permuted", "part"), strict=True)
    ]
    for (name, inputs), ((y,), _) in zip(cases, interpret(specs, cases, tmp_path), strict=True):
        problem, want = PROBLEMS[name][0], exact(PROBLEMS[name][0], *inputs)
        assert y.dtype is inputs[0].dtype and y.stride() == torch.empty_like(inputs[0]).stride()
        # The interpreter cuts to bf16 where a GPU rounds, so the rounding costs twice as much here.
        bound = {"f32": 1e-6, "f16": 1e-3, "bf16": 8e-3}[problem.x]
        assert float((y.double() - want).norm() / want.norm()) <= bound, name


@pytest.mark.parametrize("name", PROBLEMS)
def test_twin(name: str) -> None:
    problem = PROBLEMS[name][0]
    module = types.ModuleType("twins")
    exec(reference_text([rope.rotate("turn", problem)]), module.__dict__)
    inputs = draw(problem, SIZES[1], "permuted")
    want = exact(problem, *inputs)
    bound = {"f32": 1e-6, "f16": 5e-4, "bf16": 4e-3}[problem.x]
    assert float((module.turn(*inputs).double() - want).norm() / want.norm()) <= bound


NODE = """
func @f(%x: bf16[B, 4, S, 16], %cos: f32[1, S, 16], %sin: f32[1, S, 16]) {
  %y: bf16[B, 4, S, 16] = rope(%x, %cos, %sin) {style = "half", inverse = true}
  return %y
}
"""


def node(*changes: tuple[str, str]) -> Node:
    """The node `rope` of a function with such types."""
    text = NODE
    for old, new in changes:
        text = text.replace(old, new)
    return module_of(text).functions["f"].nodes[0]


def test_problem_of_a_node() -> None:
    assert rope.problem_of(node()) == Rope("bf16", "f32", 16, 16, BHS, ("", "S"), 4, inverse=True)
    permuted = node(("[B, 4, S, 16]", "[B, S, 4, 16]"), ("[1, S, 16]", "[B, S, 1, 8]"), ("half", "interleaved"))
    want = Rope("bf16", "f32", 16, 8, BSH, ("B", "S", ""), 4, "interleaved", inverse=True)
    assert rope.problem_of(permuted) == want
    assert rope.problem_of(node(("[B, 4, S, 16]", "[S, B, 16]"), ("[1, S, 16]", "[S, 1, 16]"))) == Rope(
        "bf16", "f32", 16, 16, ("S", "H"), ("S", ""), 0, inverse=True
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ([("[B, 4, S, 16]", "[B, 4, S, 4*S]"), ("[1, S, 16]", "[1, S, 4*S]")], "the last dim 4*S is not a known"),
        ([("bf16", "f64")], "x is f64"),
        ([("f32", "f64")], "cos is f64"),
        ([("%sin: f32", "%sin: bf16")], "cos is f32 but sin is bf16"),
        ([("[1, S, 16]", "[B, 4, S, 16]")], "differs in every row"),
        ([("[B, 4, S, 16]", "[B, 2, 4, S, 16]")], "x has 5 dims"),
        ([("16]", "8192]")], "the last dim is 8192"),
    ],
)
def test_refusals_name_the_reason(changes: list[tuple[str, str]], reason: str) -> None:
    assert reason in str(rope.problem_of(node(*changes)))


def test_tiles_are_powers_of_two_of_a_bounded_size() -> None:
    for heads, width in itertools.product([0, 1, 2, 3, 6, 12, 16, 20, 32, 40, 128, 129], [2, 10, 64, 80, 128, 4096]):
        cut = rope.tuning(Rope("bf16", "f32", width, width, BHS, ("S",), heads))
        row = 1 << (width - 1).bit_length()
        assert all(n & (n - 1) == 0 for n in (cut.positions, cut.heads))
        assert cut.positions * cut.heads * row == max(rope.TILE_ELEMENTS, row)


def test_emitted_lines_fit() -> None:
    specs: list[Any] = [rope.rotate(name, problem, cut) for name, (problem, cut) in PROBLEMS.items()]
    for text in (kernels_text(specs), reference_text(specs)):
        assert max(map(len, text.splitlines())) <= 120


COMPILE = """
import json, sys
from pathlib import Path
from mgraph.codegen.triton import build_kernels, rope
from mgraph.codegen.triton.rope import Rope
axes = ("B", "H", "S")
specs = [
    rope.rotate("queries", Rope("bf16", "bf16", 128, 128, axes, ("", "S"), 16)),
    rope.rotate("keys", Rope("bf16", "f32", 128, 64, axes, ("", "S"), 4, "interleaved", inverse=True)),
]
json.dump(build_kernels(specs, Path(sys.argv[1]), ["sm_90a"]), sys.stdout)
"""


def test_binaries(tmp_path: Path) -> None:
    """Aligned ones move tiles without shared memory: x, y and tables have one layout."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(tmp_path)],
        env={**environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    for entry in json.loads(done.stdout):
        aligned, generic = entry["launches"][0]["binaries"]
        assert (aligned["alignment"], generic["alignment"]) == (16, 1)
        assert aligned["shared"] == 0 and aligned["threads"] == 128
