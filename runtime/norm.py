"""Layer normalisation on torch's fused kernels, and RMS normalisation with what comes before and after."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mgraph.runtime.ops import rope, wide

_aten: Any = torch.ops.aten


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """`(x - mean) * rstd * weight + bias` over the last dim, with mean and rstd [..., 1] in at least f32."""
    y, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
    return y, wide(mean), wide(rstd)


def layer_norm_grad(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `layer_norm` for x, weight and bias."""
    if x.dtype not in (torch.float32, torch.float64) and not x.is_cuda:
        # On the CPU torch takes statistics of the dtype of x alone, which would round them.
        dx, dweight, dbias = layer_norm_grad(dy.float(), x.float(), weight.float(), bias.float(), mean, rstd)
        return dx.to(x.dtype), dweight.to(weight.dtype), dbias.to(bias.dtype)
    made: tuple[Tensor, Tensor, Tensor] = _aten.native_layer_norm_backward(
        dy.contiguous(), x.contiguous(), x.shape[-1:], mean, rstd, weight, bias, [True, True, True]
    )
    return made


def rms_norm(
    x: Tensor, weight: Tensor, *, eps: float, offset: float = 0.0, round: str = "product"
) -> tuple[Tensor, Tensor]:
    """The RMS norm `x * rstd * (weight + offset)` over the last dim, and rstd [..., 1] in at least f32.

    With `round="normed"` the product `x * rstd` is rounded before that with the weight.
    """
    values = wide(x)
    rstd = values.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    normed = values * rstd
    if round == "normed":
        normed = wide(normed.to(x.dtype))
    return normed.mul_(_offset(weight, offset)).to(x.dtype), rstd


def rms_norm_grad(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    *,
    eps: float,
    offset: float = 0.0,
    round: str = "product",
) -> tuple[Tensor, Tensor]:
    """Gradients of `rms_norm` for x and weight."""
    dx, dweight = _rms_norm_grad(dy, x, weight, rstd, offset, round)
    return dx.to(x.dtype), dweight.to(weight.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float, offset: float = 0.0, round: str = "product"
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of x and residual, its RMS norm `sum * rstd * (weight + offset)`, and rstd [..., 1] in at least f32.

    With `round="normed"` the product `sum * rstd` is rounded before that with the weight.
    """
    total = x + residual
    return total, *rms_norm(total, weight, eps=eps, offset=offset, round=round)


def add_rms_norm_grad(
    dy: Tensor,
    dsum: Tensor,
    total: Tensor,
    weight: Tensor,
    rstd: Tensor,
    *,
    eps: float,
    offset: float = 0.0,
    round: str = "product",
) -> tuple[Tensor, Tensor]:
    """Gradients of `add_rms_norm` for x and weight, from those of its norm and of its sum; dx is rounded once."""
    dx, dweight = _rms_norm_grad(dy, total, weight, rstd, offset, round)
    return dx.add_(dsum).to(total.dtype), dweight.to(weight.dtype)


def norm_rope(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    eps: float,
    offset: float = 0.0,
    round: str = "product",
    style: str = "half",
) -> tuple[Tensor, Tensor]:
    """`rope` of the RMS norm of x over the last dim, which is rounded to x's dtype; and rstd [..., 1]."""
    normed, rstd = rms_norm(x, weight, eps=eps, offset=offset, round=round)
    return rope(normed, cos, sin, style=style), rstd


def norm_rope_grad(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    rstd: Tensor,
    *,
    eps: float,
    offset: float = 0.0,
    round: str = "product",
    style: str = "half",
) -> tuple[Tensor, Tensor]:
    """Gradients of `norm_rope` for x and weight; dx is rounded once."""
    turned = rope(wide(dy), cos, sin, style=style, inverse=True)
    dx, dweight = _rms_norm_grad(turned, x, weight, rstd, offset, round)
    return dx.to(x.dtype), dweight.to(weight.dtype)


def _rms_norm_grad(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, offset: float, round: str
) -> tuple[Tensor, Tensor]:
    """dx and dweight before they are rounded."""
    wide_dy, normed = wide(dy), wide(x) * rstd
    seen = wide(normed.to(x.dtype)) if round == "normed" else normed
    dweight = (wide_dy * seen).reshape(-1, x.shape[-1]).sum(0)
    dx = wide_dy * _offset(weight, offset)
    mean = (dx * normed).mean(-1, keepdim=True)
    return dx.addcmul_(normed, mean, value=-1).mul_(rstd), dweight


def _offset(weight: Tensor, offset: float) -> Tensor:
    return wide(weight) + offset if offset else wide(weight)
