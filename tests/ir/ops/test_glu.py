"""glu against torch's activations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

ACTIVATIONS = {
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_erf": functional.gelu,
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
