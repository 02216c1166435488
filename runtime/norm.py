"""Layer normalisation on torch's fused kernels, and RMS normalisation of a sum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_aten: Any = torch.ops.aten


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """`(x - mean) * rstd * weight + bias` over the last dim, with mean and rstd [..., 1] in at least f32."""
    y, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
    return y, _wide(mean), _wide(rstd)


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


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float, offset: float = 0.0, round: str = "product"
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of x and residual, its RMS norm `sum * rstd * (weight + offset)`, and rstd [..., 1] in at least f32.

    With `round="normed"` the product `sum * rstd` is rounded before that with the weight.
    """
    total = x + residual
    wide = _wide(total)
    rstd = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    normed, scale = wide * rstd, _offset(weight, offset)
    if round == "normed":
        normed = _wide(normed.to(x.dtype))
    return total, normed.mul_(scale).to(x.dtype), rstd


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
    wide_dy, normed = _wide(dy), _wide(total) * rstd
    seen = _wide(normed.to(total.dtype)) if round == "normed" else normed
    dweight = (wide_dy * seen).reshape(-1, total.shape[-1]).sum(0)
    dx = wide_dy * _offset(weight, offset)
    mean = (dx * normed).mean(-1, keepdim=True)
    dx.addcmul_(normed, mean, value=-1).mul_(rstd).add_(dsum)
    return dx.to(total.dtype), dweight.to(weight.dtype)


def _offset(weight: Tensor, offset: float) -> Tensor:
    return _wide(weight) + offset if offset else _wide(weight)


def _wide(statistic: Tensor) -> Tensor:
    return statistic if statistic.dtype == torch.float64 else statistic.float()
