"""norm_rope against torch's norm and the complex product, and its rounding points."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mgraph.ir.opdef import op_def


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize(("round_", "offset"), [("normed", 0.0), ("product", 1.0)])
@pytest.mark.parametrize(("shape", "table"), [((2, 5, 3, 8), (5, 1, 8)), ((2, 3, 5, 6), (1, 5, 3)), ((1, 2), (1, 1))])
def test_values_and_gradient(
    check_op: Any, shape: tuple[int, ...], table: tuple[int, ...], round_: str, offset: float, style: str
) -> None:
    x, weight = torch.randn(shape, requires_grad=True), torch.randn(shape[-1], requires_grad=True)
    angle = torch.randn(*table[:-1], shape[-1] // 2, dtype=torch.float64)
    wide = table[-1] == shape[-1]
    both = torch.cat((angle, angle), -1) if style == "half" else angle.repeat_interleave(2, -1)
    cos, sin = (both if wide else angle).cos(), (both if wide else angle).sin()

    def reference(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = torch.rms_norm(x, x.shape[-1:], weight + offset, 1e-5)
        pairs = normed.unflatten(-1, (2, -1)).mT if style == "half" else normed.unflatten(-1, (-1, 2))
        turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle)
        real = torch.view_as_real(turned)
        return (real.mT if style == "half" else real).flatten(-2)

    attrs = {"eps": 1e-5, "offset": offset, "round": round_, "style": style}
    _, rstd = check_op("norm_rope", (x, weight, cos, sin), attrs, reference)
    assert rstd.shape == (*shape[:-1], 1)


def test_rounding_points() -> None:
    """In bf16 it is bit for bit the norm and then the rotation; backward nothing between them is rounded."""
    x, dy, weight = torch.randn(9, 3, 16).bfloat16(), torch.randn(9, 3, 16).bfloat16(), torch.randn(16).bfloat16()
    cos, sin = torch.randn(9, 1, 16).bfloat16(), torch.randn(9, 1, 16).bfloat16()
    attrs = {"eps": 1e-6, "round": "normed"}
    y, rstd = op_def("norm_rope").body(x, weight, cos, sin, **attrs)
    normed, apart = op_def("rms_norm").body(x, weight, **attrs)
    assert torch.equal(y, op_def("rope").body(normed, cos, sin)) and torch.equal(rstd, apart)
    dx, dweight = op_def("norm_rope_grad").body(dy, x, weight, cos, sin, rstd, **attrs)
    turned = op_def("rope").body(dy.float(), cos, sin, inverse=True)
    want = op_def("rms_norm_grad").body(turned, x, weight, rstd, **attrs)
    assert torch.equal(dx, want[0]) and torch.equal(dweight, want[1])
