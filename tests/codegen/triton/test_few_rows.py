"""Products of a few rows: the twins and the kernels in Triton's interpreter, both against float64."""

from __future__ import annotations

import math
import types
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mgraph.codegen.triton import few_rows, reference_text
from mgraph.codegen.triton.few_rows import FewRows, Tuning
from mgraph.codegen.triton.glu import Glu
from mgraph.runtime.kernels import evaluate
from tests.codegen.triton.interpret_cases import BROKEN_INTERPRETER, Case, interpret

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
BOUNDS = {"f32": 2e-6, "bf16": 6e-3, "f16": 5e-4}
SHAPES: list[tuple[int, ...]] = [(1,), (1, 2), (3,), (2, 8), (17,), (0,)]
SMALL = {"one": Tuning(1, 4, 64, 1, 1), "more": Tuning(16, 16, 32, 1, 2)}
LIMITED = Glu(24, 1, "f32", "quick_gelu", limit=1.0, offset=1.0)
PROBLEMS = {
    "plain": FewRows(128, 64, "f32"),
    "odd": FewRows(77, 37, "f32", bias=True, residual=True),
    "residual": FewRows(96, 40, "f16", residual=True),
    "bias": FewRows(130, 33, "bf16", bias=True),
    "silu": FewRows(72, 35, "bf16", glu=Glu(35, 1, "bf16", "silu")),
    "limited": FewRows(64, 24, "f32", glu=LIMITED),
    "turned": FewRows(72, 40, "f16", bias=True, turned=True),
}


def draw(problem: FewRows, shape: tuple[int, ...], gaps: bool = False) -> tuple[Tensor, ...]:
    """The inputs of a site; x with gaps between its elements, if asked for."""
    generator = torch.Generator().manual_seed(problem.size + sum(shape))
    matrix = (problem.size, problem.columns) if problem.turned else (problem.columns, problem.size)
    shapes = {"x": (*shape, problem.size), "bias": (problem.columns,), "residual": (*shape, problem.columns)}
    made = []
    for name in problem.operands:
        extents = shapes.get(name, matrix)
        tensor = torch.randn(*extents, 2, generator=generator).to(DTYPES[problem.dtype])[..., 0]
        made.append(tensor if gaps and name == "x" else tensor.contiguous())
    return tuple(made)


def exact(problem: FewRows, given: tuple[Tensor, ...]) -> Tensor:
    """The result in float64, by torch's own functions."""
    named = dict(zip(problem.operands, (tensor.double() for tensor in given), strict=True))
    if problem.turned:
        return torch.addmm(named["bias"], named["x"], named["weight"])
    if problem.glu is None:
        y = functional.linear(named["x"], named["weight"], named.get("bias"))
        return y + named.get("residual", 0.0)
    gate, up = (functional.linear(named["x"], named[name]) for name in ("gate", "up"))
    if problem.glu.limit:
        gate, up = gate.clamp(max=problem.glu.limit), up.clamp(-problem.glu.limit, problem.glu.limit)
    alpha = problem.glu.alpha if problem.glu.act == "quick_gelu" else 1.0
    return gate * torch.sigmoid(alpha * gate) * (up + problem.glu.offset)


def check(problem: FewRows, given: tuple[Tensor, ...], found: Tensor, factor: float = 1.0) -> None:
    """Shape, dtype, and the error in the Frobenius norm."""
    want = exact(problem, given)
    assert found.shape == want.shape and found.dtype is DTYPES[problem.dtype]
    if want.numel():
        off = float((found.double() - want).norm() / want.norm())
        assert off <= factor * BOUNDS[problem.dtype], off


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", PROBLEMS)
def test_twins(name: str, shape: tuple[int, ...]) -> None:
    problem = PROBLEMS[name]
    twins = types.ModuleType("twins")
    made = few_rows.fixed if problem.turned else few_rows.forward
    exec(reference_text([made("product", problem)]), twins.__dict__)
    shape = (math.prod(shape),) if problem.turned else shape
    given = draw(problem, shape)
    check(problem, given, twins.product(*given), factor=2.0)  # what is not the last result is rounded, too


@pytest.mark.skipif(BROKEN_INTERPRETER, reason="this interpreter and this NumPy do not fit")
def test_kernels(tmp_path: Path) -> None:
    sites = [(name, way) for name in PROBLEMS if name != "turned" for way in SMALL]
    specs = [few_rows.forward(f"{way}_{name}", PROBLEMS[name], SMALL[way]) for name, way in sites]
    named: list[tuple[str, str, tuple[int, ...], bool]] = []
    named += [(name, way, shape, False) for name, way in sites for shape in ((1,), (3,))]
    named += [("silu", "more", shape, False) for shape in SHAPES]
    named += [("odd", "more", (rows,), rows % 2 == 0) for rows in range(4, 18, 3)]
    cases: list[Case] = [(f"{way}_{name}", draw(PROBLEMS[name], shape, gaps)) for name, way, shape, gaps in named]
    x, weight = draw(PROBLEMS["plain"], (16,))
    counts = (16, 1, 5)
    alone: list[Case] = [(f"{way}_plain", (x[:rows], weight)) for way in SMALL for rows in counts]
    specs.append(few_rows.forward("both", PROBLEMS["silu"], *SMALL.values()))
    named += [("silu", "both", (rows,), False) for rows in (1, 2)]
    cases += [("both", draw(PROBLEMS["silu"], (rows,))) for rows in (1, 2)]
    found = interpret(specs, cases + alone, tmp_path)
    rest = [results[0] for results, _ in found[len(cases) :]]
    for index, y in enumerate(rest):  # what a row gives does not depend on how many there are
        assert torch.equal(y, rest[index - index % len(counts)][: y.shape[0]])
    for (name, *_), (_, given), (results, _) in zip(named, cases, found[: len(cases)], strict=True):
        check(PROBLEMS[name], given, results[0])


@pytest.mark.skipif(BROKEN_INTERPRETER, reason="this interpreter and this NumPy do not fit")
def test_in_one_way_a_row_is_the_same_among_any_number(tmp_path: Path) -> None:
    """What `--batch-invariant` compiles: the first rows of many, bit by bit, and all against float64."""
    names, counts = ("odd", "turned", "silu"), (65, 1, 2, 17, 64)
    specs = [few_rows.fixed(name, PROBLEMS[name]) for name in names]
    all_ = {name: draw(PROBLEMS[name], (counts[0],)) for name in names}
    cases: list[Case] = [
        (name, tuple(t[:rows] if t.shape[0] == counts[0] else t for t in all_[name]))
        for name in names
        for rows in counts
    ]
    found = [results[0] for results, _ in interpret(specs, cases, tmp_path)]
    for index, ((name, given), y) in enumerate(zip(cases, found, strict=True)):
        check(PROBLEMS[name], given, y)
        assert torch.equal(y, found[index - index % len(counts)][: y.shape[0]]), (name, y.shape)


def test_one_way_is_cut_by_the_weight_alone() -> None:
    for columns, width in ((1024, 32), (4096, 64), (14336, 64), (128256, 128)):
        assert few_rows.fixed_tuning(FewRows(4096, columns, "bf16")).columns == width
        (launch,) = few_rows.fixed("product", FewRows(4096, columns, "bf16")).launches
        assert [evaluate(extent, {"rows": 130}) for extent in launch.grid] == [3, columns // width]


def test_of_two_ways_one_runs() -> None:
    problems = [problem for problem in PROBLEMS.values() if not problem.turned]
    for launches in (few_rows.forward("product", problem).launches for problem in problems):
        for rows in range(1, 18):
            run = [launch.function for launch in launches if evaluate(launch.when, {"rows": rows})]
            assert run == ["product_rows" if rows > 1 and len(launches) > 1 else "product_one"]
