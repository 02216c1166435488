"""Layer normalisation of the runtime against its definition."""

from __future__ import annotations

import pytest
import torch

from mgraph.ir.opdef import op_def
from mgraph.runtime import v1 as rt


@pytest.mark.parametrize("shape", [(1, 3), (4, 5, 33), (0, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_layer_norm_and_its_gradient(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, dy = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    weight, bias = torch.randn(shape[-1]).to(dtype), torch.randn(shape[-1]).to(dtype)
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 1e-2}[dtype]
    expected = op_def("layer_norm").body(x, weight, bias, eps=1e-5)
    found = rt.layer_norm(x, weight, bias, eps=1e-5)
    for mine, wanted in zip(found, expected, strict=True):
        assert mine.shape == wanted.shape and mine.dtype == wanted.dtype
        torch.testing.assert_close(mine, wanted, rtol=tolerance, atol=tolerance)
    wanted_grads = op_def("layer_norm_grad").body(dy, x, weight, bias, *expected[1:])
    for mine, wanted in zip(rt.layer_norm_grad(dy, x, weight, bias, *expected[1:]), wanted_grads, strict=True):
        assert mine.shape == wanted.shape and mine.dtype == wanted.dtype
        torch.testing.assert_close(mine, wanted, rtol=tolerance, atol=tolerance)
