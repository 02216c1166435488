"""Attention: the kernel in Triton's interpreter, and its twin, against the op's body in float64."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
import torch

from mgraph.codegen.triton import attention, kernels_text, reference_text
from mgraph.codegen.triton.attention import Tuning
from tests.codegen.triton.attention_cases import DISPLACED, PROBLEMS, displaced, draw, error, results
from tests.codegen.triton.interpret_cases import BROKEN_INTERPRETER, Case, interpret

CUT, SMALL = Tuning(64, 64, 4, 2), Tuning(32, 32, 4, 2)
"""The latter is small enough for three loops where the window is long."""


@pytest.mark.skipif(
    BROKEN_INTERPRETER,
    reason="the interpreter of Triton before 3.7 makes numbers of arrays with a dim, which NumPy 2.5 no longer does",
)
def test_kernels_in_the_interpreter(tmp_path: Path) -> None:
    """All masks alone and together, odd sizes, heads that share keys, permuted parts of projections."""
    specs = [attention.forward(n, problem, SMALL if "long" in n else CUT) for n, problem in PROBLEMS.items()]
    cases: list[Case] = [(name, draw(name)) for name in PROBLEMS]
    cases += [(name, displaced(draw(name))) for name in DISPLACED]
    for (name, inputs), ((out, lse), _) in zip(cases, interpret(specs, cases, tmp_path), strict=True):
        want, want_lse = results(name, inputs)
        bound = {"f16": 1e-3, "bf16": 1e-2}[PROBLEMS[name].dtype]  # The interpreter cuts to bf16 where a GPU rounds.
        assert out.dtype is inputs[0].dtype and lse.dtype is torch.float32
        assert error(out, want) <= bound, name
        assert error(lse, want_lse) <= 2e-6, name


@pytest.mark.parametrize("name", PROBLEMS)
def test_twin(name: str) -> None:
    module = types.ModuleType("twins")
    exec(reference_text([attention.forward("attend", PROBLEMS[name])]), module.__dict__)
    inputs = draw(name)
    out, lse = module.attend(*inputs)
    want, want_lse = results(name, inputs)
    assert error(out, want) <= {"f16": 1e-3, "bf16": 8e-3}[PROBLEMS[name].dtype]
    assert error(lse, want_lse) <= 1e-2


def test_emitted_lines_fit() -> None:
    specs = [attention.forward(name, problem) for name, problem in PROBLEMS.items()]
    for text in (kernels_text(specs), reference_text(specs)):
        assert max(map(len, text.splitlines())) <= 120
