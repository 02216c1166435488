"""Cases of products of a few rows with a weight: those of a decode step of Llama 3.2 1B and 3.1 8B, and their heads.

Expected before any was measured, on an H200 that copies 4.2 TB/s: one row at 0.75 of what a copy moves plus 2 us, so of
the 1B 6 us for q, k and v in one, 5 us for o, 23 us for gate and up, 13 us for down and 170 us for the head; sixteen
rows about a tenth slower.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.kernel_case import Case
from mgraph.codegen.triton import few_rows
from mgraph.codegen.triton.few_rows import FewRows, Tuning
from mgraph.codegen.triton.glu import Glu
from mgraph.runtime.kernels import DTYPES

_ONE = [Tuning(1, *cut) for cut in ((2, 1024, 4, 1), (4, 1024, 4, 1), (4, 512, 4, 3), (8, 512, 4, 1), (1, 2048, 4, 1))]
_MORE = [
    Tuning(16, *cut) for cut in ((16, 256, 2, 4), (32, 128, 4, 4), (32, 256, 4, 4), (16, 512, 2, 3), (64, 128, 4, 4))
]


def inputs(problem: FewRows, rows: int) -> Callable[[torch.device], tuple[Tensor, ...]]:
    """A few rows and weights of such a size that the results are about 1."""

    def make(device: torch.device) -> tuple[Tensor, ...]:
        shapes = {"x": (rows, problem.size), "bias": (problem.columns,), "residual": (rows, problem.columns)}
        weight = (problem.columns, problem.size)
        drawn = {name: torch.randn(shapes.get(name, weight), device=device) for name in problem.operands}
        scales = dict.fromkeys(problem.weights, problem.size**-0.5)
        return tuple((t * scales.get(name, 1.0)).to(DTYPES[problem.dtype]) for name, t in drawn.items())

    return make


def plain(problem: FewRows) -> Callable[..., tuple[Tensor, ...]]:
    """The same by torch's functions, one after the other."""

    def run(x: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        if problem.glu:
            return (functional.silu(functional.linear(x, given[0])) * functional.linear(x, given[1]),)
        y = functional.linear(x, given[0], given[1] if problem.bias else None)
        return (y + given[-1] if problem.residual else y,)

    return run


def case(name: str, problem: FewRows, rows: int, cut: Tuning | None = None) -> Case:
    """A case; the weights are read once."""
    cuts = (cut,) if cut else (few_rows.tunings(problem) if rows == 1 or problem.glu else (_MORE[1],))
    elements = len(problem.weights) * problem.columns * problem.size
    elements += rows * (problem.size + problem.columns * (1 + problem.residual))
    return Case(
        id=f"G1-{name}-{rows}",
        workload=f"{rows} rows, {problem}",
        spec=few_rows.forward(name.replace("-", "_"), problem, *cuts),
        inputs=inputs(problem, rows),
        reference=plain(problem),
        peers={"eager": plain(problem)},
        bytes=elements * DTYPES[problem.dtype].itemsize,
        bound=5e-3,
    )


def _unit(size: int, columns: int) -> FewRows:
    return FewRows(size, columns, "bf16", glu=Glu(columns, 1, "bf16", "silu"))


PROBLEMS = {
    "qkv-1b": FewRows(2048, 3072, "bf16"),
    "o-1b": FewRows(2048, 2048, "bf16", residual=True),
    "unit-1b": _unit(2048, 8192),
    "down-1b": FewRows(8192, 2048, "bf16", residual=True),
    "head-1b": FewRows(2048, 128256, "bf16"),
    "k-8b": FewRows(4096, 1024, "bf16"),
    "qkv-8b": FewRows(4096, 6144, "bf16"),
    "o-8b": FewRows(4096, 4096, "bf16", residual=True),
    "unit-8b": _unit(4096, 14336),
    "down-8b": FewRows(14336, 4096, "bf16", residual=True),
}
CASES = [case(name, problem, rows) for rows in (1, 4, 16) for name, problem in PROBLEMS.items()]

TUNINGS = [
    case(f"{name}-{'x'.join(map(str, vars(cut).values()))}", PROBLEMS[name], rows, cut)
    for name in ("o-1b", "unit-1b", "down-1b", "unit-8b")
    for rows, cuts in ((1, _ONE + _MORE[:3]), (16, _MORE))
    for cut in cuts
]
"""Four of the cases, cut in other ways."""
