"""Grouped linear maps against a slice-by-slice product, their gradients against finite differences."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

from mgraph.models.grouped import grouped_linear, grouped_linear_weight

ENDS = [[3, 3, 7, 11], [0, 0, 0, 11], [11, 11, 11, 11], [1, 2, 10, 11]]  # empty groups first, between, last


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values(ends: list[int], dtype: torch.dtype) -> None:
    rows, weight = torch.randn(11, 5).to(dtype), torch.randn(4, 5, 3).to(dtype)
    out = grouped_linear(rows, weight, torch.tensor(ends, dtype=torch.int32))
    group = [next(e for e, end in enumerate(ends) if row < end) for row in range(11)]
    expected = torch.stack([rows[row].double() @ weight[group[row]].double() for row in range(11)])
    assert torch.allclose(out.double(), expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-2)


@pytest.mark.parametrize("ends", ENDS)
def test_gradients(ends: list[int]) -> None:
    rows = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 5, 3, dtype=torch.float64, requires_grad=True)
    offsets = torch.tensor(ends, dtype=torch.int32)
    assert torch.autograd.gradcheck(lambda r, w: grouped_linear(r, w, offsets), (rows, weight))


def test_operators_are_registered_well() -> None:
    """Fake shapes, gradient registration and tracing agree with the real operators."""
    rows, weight, grad = torch.randn(11, 5), torch.randn(4, 5, 3, requires_grad=True), torch.randn(11, 3)
    ends = torch.tensor(ENDS[0], dtype=torch.int32)
    assert set(opcheck(grouped_linear, (rows, weight, ends)).values()) == {"SUCCESS"}
    assert set(opcheck(grouped_linear_weight, (rows, grad, ends)).values()) == {"SUCCESS"}


@pytest.mark.gpu
def test_library_kernel_equals_loop() -> None:
    rows, weight = torch.randn(300, 64), torch.randn(4, 64, 48)
    ends = torch.tensor([100, 100, 257, 300], dtype=torch.int32)
    results = []
    for device in ("cpu", "cuda"):
        r = rows.to(device, torch.bfloat16).requires_grad_()
        w = weight.to(device, torch.bfloat16).requires_grad_()
        out = grouped_linear(r, w, ends.to(device))
        results.append([t.float().cpu() for t in (out, *torch.autograd.grad(out.float().square().sum(), (r, w)))])
    for on_cpu, on_cuda in zip(*results, strict=True):
        assert torch.allclose(on_cpu, on_cuda, rtol=2e-2, atol=2e-2 * on_cpu.abs().max().item())
