"""Scores with noise: the kernel in Triton's interpreter and its twin against torch's own form, row by row."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mgraph.codegen.triton import perturb, reference_text
from mgraph.codegen.triton.likeliest import Likeliest
from mgraph.runtime import v1 as rt
from tests.codegen.triton.interpret_cases import BROKEN_INTERPRETER, interpret

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
PROBLEMS = {
    "tiny": Likeliest(7, "f32"),
    "even": Likeliest(4096, "f16"),
    "odd": Likeliest(2 * 4096 + 1029, "f32"),
    "brain": Likeliest(3 * 4096 - 8, "bf16"),
}


def draw(problem: Likeliest, rows: int) -> tuple[Tensor, ...]:
    """Scores, some of which are masked away; a row of temperature 0; seeds and draws beyond 32 bits."""
    scores = 4 * torch.randn(rows, problem.classes, generator=torch.Generator().manual_seed(rows))
    scores[0, problem.classes // 2 :] = -torch.inf
    temperature = torch.tensor([1.0, 0.0, 0.3, 2.0, 1e-4])[:rows]
    seeds = torch.tensor([0, 1, 2**62 + 77, 2**32, 12345])[:rows]
    draws = torch.tensor([0, 3, 2**40 + 5, 999, 1])[:rows]
    return scores.to(DTYPES[problem.dtype]), temperature, seeds, draws


@pytest.mark.skipif(
    BROKEN_INTERPRETER,
    reason="the interpreter of Triton before 3.7 makes numbers of arrays with a dim, which NumPy 2.5 no longer does",
)
def test_kernels_in_the_interpreter(tmp_path: Path) -> None:
    """Every row alone has the bits that it has among others."""
    specs = [perturb.build(name, problem) for name, problem in PROBLEMS.items()]
    cases = [(name, draw(problem, 5)) for name, problem in PROBLEMS.items()]
    alone = [(name, tuple(tensor[2:3] for tensor in given)) for name, given in cases]
    results = interpret(specs, cases + alone, tmp_path)
    for (name, given), (made, _) in zip(cases, results, strict=False):
        torch.testing.assert_close(made[0], rt.perturb(*given), rtol=2e-6, atol=2e-6, msg=name)
        assert torch.equal(made[0][1], given[0][1].float()), "temperature 0 leaves scores as they are"
    for (together, _), (one, _) in zip(results[: len(cases)], results[len(cases) :], strict=True):
        assert torch.equal(together[0][2:3], one[0])


@pytest.mark.parametrize("name", PROBLEMS)
def test_twin(name: str) -> None:
    twins = types.ModuleType("twins")
    exec(reference_text([perturb.build("found", PROBLEMS[name])]), twins.__dict__)
    given = draw(PROBLEMS[name], 5)
    assert torch.equal(twins.found(*given), rt.perturb(*given))
