"""rms_norm against torch's own and the written-out formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor


@pytest.mark.parametrize("shape", [(1,), (3, 7), (2, 3, 5, 16), (0, 4)])
@pytest.mark.parametrize("round_", ["normed", "product"])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_values_and_gradient(check_op: Any, shape: tuple[int, ...], round_: str, offset: float) -> None:
    x = torch.randn(shape, requires_grad=True)
    weight = torch.randn(shape[-1], requires_grad=True)

    def reference(x: Tensor, weight: Tensor) -> Tensor:
        return torch.rms_norm(x, x.shape[-1:], weight + offset, 1e-5)

    _, rstd = check_op("rms_norm", (x, weight), {"eps": 1e-5, "offset": offset, "round": round_}, reference)
    assert rstd.shape == (*shape[:-1], 1)


@pytest.mark.parametrize("round_", ["normed", "product"])
def test_rounding_points(run_op: Any, round_: str) -> None:
    x, weight = torch.randn(9, 33).bfloat16(), torch.randn(33).bfloat16()
    (y, rstd), _ = run_op("rms_norm", (x, weight), {"eps": 1e-6, "round": round_}, torch.ones(9, 33).bfloat16())
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    expected = weight * normed.bfloat16() if round_ == "normed" else (weight.float() * normed).bfloat16()
    assert torch.equal(y, expected)
    assert rstd.dtype == torch.float32


@pytest.mark.parametrize("shape", [(1,), (3, 7), (2, 3, 5, 16), (0, 4)])
def test_layer_norm(check_op: Any, shape: tuple[int, ...]) -> None:
    x, weight, bias = (torch.randn(s, requires_grad=True) for s in (shape, shape[-1:], shape[-1:]))

    def reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)

    _, mean, rstd = check_op("layer_norm", (x, weight, bias), {"eps": 1e-5}, reference)
    assert mean.shape == rstd.shape == (*shape[:-1], 1)
