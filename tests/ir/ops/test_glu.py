"""glu against torch's activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_erf": functional.gelu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 3, 8), (0, 4)])
def test_values_and_gradient(check_op: Any, act: str, shape: tuple[int, ...]) -> None:
    gate, up = (3 * torch.randn(shape)).requires_grad_(), torch.randn(shape, requires_grad=True)
    check_op("glu", (gate, up), {"act": act}, lambda gate, up: ACTIVATIONS[act](gate) * up)


def test_low_precision_rounds_once(run_op: Any) -> None:
    gate, up = torch.randn(64).bfloat16(), torch.randn(64).bfloat16()
    (y,), (dgate, dup) = run_op("glu", (gate, up), {"act": "silu"}, torch.ones(64).bfloat16())
    assert torch.equal(y, (functional.silu(gate.float()) * up.float()).bfloat16())
    assert dgate.dtype == dup.dtype == torch.bfloat16


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_limit_and_offset(check_op: Any, act: str) -> None:
    """gpt-oss: cut before the activation; some numbers lie past the limit, some on it."""
    gate, up = (4 * torch.randn(7, 5)).requires_grad_(), (4 * torch.randn(7, 5)).requires_grad_()
    with torch.no_grad():
        gate[0, 0] = up[0, 1] = 2.0
        up[0, 2] = -2.0

    def reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return ACTIVATIONS[act](gate.clamp(max=2.0)) * (up.clamp(-2.0, 2.0) + 1)

    check_op("glu", (gate, up), {"act": act, "limit": 2.0, "offset": 1.0}, reference)


def test_squared_relu(check_op: Any) -> None:
    check_op("squared_relu", (torch.randn(3, 5, requires_grad=True),), {}, lambda x: functional.relu(x).square())
