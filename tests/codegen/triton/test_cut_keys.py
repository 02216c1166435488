"""What cuts leave of rows: the kernel in Triton's interpreter and its twin against the meaning, which sorts."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
import torch

from mgraph.codegen.triton import cut_keys, reference_text
from mgraph.codegen.triton.likeliest import PART as BLOCK
from mgraph.codegen.triton.likeliest import Likeliest
from tests.codegen.triton.cut_cases import check, draw
from tests.codegen.triton.interpret_cases import BROKEN_INTERPRETER, interpret

PROBLEMS = {
    "tiny": Likeliest(7, "f32"),
    "even": Likeliest(BLOCK, "bf16"),
    "odd": Likeliest(2 * BLOCK + 5, "f32"),
}


@pytest.mark.skipif(
    BROKEN_INTERPRETER,
    reason="the interpreter of Triton before 3.7 makes numbers of arrays with a dim, which NumPy 2.5 no longer does",
)
def test_kernels_in_the_interpreter(tmp_path: Path) -> None:
    """Every row alone has the bits that it has among others."""
    specs = [cut_keys.build(name, problem) for name, problem in PROBLEMS.items()]
    cases = [(name, draw(problem, seed)) for name, problem in PROBLEMS.items() for seed in (0, 1)]
    alone = [(name, tuple(tensor[11:12] for tensor in given)) for name, given in cases]
    results = interpret(specs, cases + alone, tmp_path)
    for (name, given), (made, _) in zip(cases, results, strict=False):
        check(made[0], given, name)
    for (together, _), (one, _) in zip(results[: len(cases)], results[len(cases) :], strict=True):
        assert torch.equal(together[0][11:12], one[0])


@pytest.mark.parametrize("name", PROBLEMS)
def test_twin(name: str) -> None:
    twins = types.ModuleType("twins")
    exec(reference_text([cut_keys.build("found", PROBLEMS[name])]), twins.__dict__)
    for seed in range(4):
        given = draw(PROBLEMS[name], seed)
        check(twins.found(*given), given, name)
