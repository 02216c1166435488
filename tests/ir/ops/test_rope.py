"""rope against a complex rotation, and its inverse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mgraph.ir.ops.rope import rope


def _complex(x: Tensor, angles: Tensor, style: str) -> Tensor:
    half = x.shape[-1] // 2
    parts = (x[..., :half], x[..., half:]) if style == "half" else (x[..., 0::2], x[..., 1::2])
    turned = torch.complex(*parts) * torch.polar(torch.ones_like(angles), angles)
    if style == "interleaved":
        return torch.view_as_real(turned).flatten(-2)
    return torch.cat((turned.real, turned.imag), -1)


@pytest.mark.parametrize(("shape", "tables"), [((2, 3, 5, 8), (1, 1, 5)), ((1, 1, 1, 2), (1,)), ((2, 7, 6), (2, 7))])
@pytest.mark.parametrize("repeat", [1, 2])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_values_and_gradient(check_op: Any, shape: Any, tables: Any, repeat: int, inverse: bool, style: str) -> None:
    angles = torch.randn(*tables, shape[-1] // 2, dtype=torch.float64)
    cos, sin = (f(angles).repeat(*[1] * len(tables), repeat) for f in (torch.cos, torch.sin))
    if style == "interleaved":
        cos, sin = (f(angles).repeat_interleave(repeat, -1) for f in (torch.cos, torch.sin))
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    signed = -angles if inverse else angles
    attrs = {"style": style, "inverse": inverse}
    check_op("rope", (x, cos, sin), attrs, lambda x, cos, sin: _complex(x, signed, style))


def test_inverse_undoes() -> None:
    x, angles = torch.randn(2, 4, 6, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    turned = rope(x, angles.cos(), angles.sin())
    torch.testing.assert_close(rope(turned, angles.cos(), angles.sin(), inverse=True), x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("width", [3, 6])
def test_gradient_of_interleaved_tables(check_op: Any, width: int) -> None:
    x, cos, sin = (torch.randn(s, requires_grad=True) for s in ((2, 5, 4, 6), (5, 1, width), (5, 1, width)))

    def reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = (t.repeat_interleave(2, -1) if width == 3 else t for t in (cos, sin))
        return x * cos + torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2) * sin

    check_op("rope", (x, cos, sin), {"style": "interleaved"}, reference)


@pytest.mark.parametrize("width", [3, 6])
def test_gradient_of_tables(check_op: Any, width: int) -> None:
    """Tables that are no rotation at all, so that every term of the gradient is seen."""
    x, cos, sin = (torch.randn(s, requires_grad=True) for s in ((2, 5, 4, 6), (5, 1, width), (5, 1, width)))

    def reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = (torch.cat((t, t), -1) if width == 3 else t for t in (cos, sin))
        return x * cos + torch.cat((-x[..., 3:], x[..., :3]), -1) * sin

    check_op("rope", (x, cos, sin), {}, reference)
