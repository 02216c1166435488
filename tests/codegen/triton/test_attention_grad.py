"""The gradient of attention: the kernels in Triton's interpreter against the op's body in float64, and
binaries."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mgraph.codegen.triton import attention_grad, kernels_text, reference_text
from mgraph.codegen.triton.attention import Tuning
from mgraph.codegen.triton.attention_grad import GradTuning
from tests.codegen.triton.attention_cases import (
    DISPLACED,
    PROBLEMS,
    displaced,
    error,
    gradients,
    operands_of_gradients,
)
from tests.codegen.triton.interpret_cases import BROKEN_INTERPRETER, Case, interpret

CUT = GradTuning(Tuning(64, 64, 4, 2), Tuning(64, 64, 4, 2))
SMALL = GradTuning(Tuning(32, 32, 4, 2), Tuning(32, 64, 4, 2))
"""Small enough for three loops where the window is long."""


def check(name: str, found: tuple[Tensor, ...], want: tuple[Tensor, ...], bound: float) -> None:
    """Each gradient has its dtype and is right."""
    assert len(found) == len(want)
    for got, expected in zip(found, want, strict=True):
        assert error(got, expected) <= bound, (name, [error(*pair) for pair in zip(found, want, strict=True)])


@pytest.mark.skipif(
    BROKEN_INTERPRETER,
    reason="the interpreter of Triton before 3.7 makes numbers of arrays with a dim, which NumPy 2.5 no longer does",
)
def test_kernels_in_the_interpreter(tmp_path: Path) -> None:
    """All masks alone and together, odd sizes, heads that share keys, permuted parts of projections."""
    specs = [attention_grad.backward(n, problem, SMALL if "long" in n else CUT) for n, problem in PROBLEMS.items()]
    cases: list[Case] = [(name, operands_of_gradients(name)) for name in PROBLEMS]
    cases += [(name, displaced(operands_of_gradients(name))) for name in DISPLACED]
    for (name, inputs), (found, _) in zip(cases, interpret(specs, cases, tmp_path), strict=True):
        bound = {"f16": 2e-3, "bf16": 2e-2}[PROBLEMS[name].dtype]  # The interpreter cuts to bf16 where a GPU rounds.
        for got, like in zip(found, inputs[1:4], strict=False):
            assert got.dtype is like.dtype
            # Along a dim of one, a stride says nothing.
            told = zip(got.stride(), torch.empty_like(like).stride(), got.shape, strict=True)
            assert all(found_stride == wanted for found_stride, wanted, size in told if size > 1)
        check(name, found, gradients(name, inputs), bound)


@pytest.mark.parametrize("name", PROBLEMS)
def test_twin(name: str) -> None:
    module = types.ModuleType("twins")
    exec(reference_text([attention_grad.backward("attend_back", PROBLEMS[name])]), module.__dict__)
    inputs = operands_of_gradients(name)
    check(name, module.attend_back(*inputs), gradients(name, inputs), {"f16": 2e-3, "bf16": 2e-2}[PROBLEMS[name].dtype])


def test_emitted_lines_fit() -> None:
    specs = [attention_grad.backward(name, problem) for name, problem in PROBLEMS.items()]
    for text in (kernels_text(specs), reference_text(specs)):
        assert max(map(len, text.splitlines())) <= 120
