"""Layer normalisation on torch's fused kernels."""

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


def _wide(statistic: Tensor) -> Tensor:
    return statistic if statistic.dtype == torch.float64 else statistic.float()
