"""The optimizer's ops: they take lists of tensors as operands, so that one node updates all parameters.

Lists are flat in the operands: all weights, then all first moments, and so on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mgraph.ir.opdef import REQUIRED, define_op
from mgraph.ir.torch_bridge import promote
from mgraph.ir.types import DType, TensorType


def _global_norm(*tensors: Any) -> Any:
    """The 2-norm of all tensors together, accumulated in f32 (f64 for f64): sqrt(sum_i |x_i|^2)."""
    import torch

    return torch.sqrt(sum(promote(t).square().sum() for t in tensors))


def _infer_global_norm(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    return (TensorType(DType.F64 if types[0].dtype is DType.F64 else DType.F32),)


global_norm = define_op("global_norm", _global_norm, infer=_infer_global_norm)


def _gradient_scale(norm: Any, count: Any, *, max_norm: float) -> Any:
    """The factor `c / n` on gradients of a loss sum over n tokens: 1/n, then clipped so that the mean's norm is at most
    `max_norm` (c = min(1, max_norm / (norm/n + 1e-6)); 0 turns clipping off). n = 0 counts as 1. Second result: norm/n.
    """
    import torch

    tokens = count.clamp(min=1).to(norm.dtype)
    mean_norm = norm / tokens
    clip = torch.clamp(max_norm / (mean_norm + 1e-6), max=1.0) if max_norm > 0 else torch.ones_like(norm)
    return clip / tokens, mean_norm


def _infer_gradient_scale(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    return types[0], types[0]


gradient_scale = define_op("gradient_scale", _gradient_scale, attrs={"max_norm": REQUIRED}, infer=_infer_gradient_scale)


def _adamw(
    *operands: Any, n: int, masters: bool, beta1: float, beta2: float, eps: float, weight_decays: Sequence[float]
) -> Any:
    """AdamW (Loshchilov & Hutter 2019, as torch.optim.AdamW): for each of n parameters, with g = scale * gradient and
    t the new step count,

        w <- w - lr * wd * w;  m <- b1 m + (1-b1) g;  v <- b2 v + (1-b2) g^2
        w <- w - lr / (1-b1^t) * m / (sqrt(v / (1-b2^t)) + eps)

    Operands: n weights, n first moments, n second moments, (with `masters`: n params of lower precision, of which the
    weights are the f32 masters), n gradients, then lr, scale, step (the old count). Results: the new weights, first
    moments, second moments, (params: the weights rounded to their dtype).
    """
    lists = 5 if masters else 4
    weights, firsts, seconds, *_, grads = (operands[i * n : (i + 1) * n] for i in range(lists))
    lr, scale, step = operands[lists * n :]
    t = (step + 1).to(lr.dtype)
    correction1, correction2 = 1 - beta1**t, 1 - beta2**t
    results: list[list[Any]] = [[], [], []]
    for w, m, v, g, decay in zip(weights, firsts, seconds, grads, weight_decays, strict=True):
        g = g.to(m.dtype) * scale
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        update = (m / correction1) / ((v / correction2).sqrt() + eps)
        for made, new in zip(results, ((w * (1 - lr * decay) - lr * update).to(w.dtype), m, v), strict=True):
            made.append(new)
    if masters:
        params = operands[3 * n : 4 * n]
        results.append([w.to(p.dtype) for w, p in zip(results[0], params, strict=True)])
    return tuple(x for made in results for x in made)


def _infer_adamw(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    n, lists = attrs["n"], 5 if attrs["masters"] else 4
    if len(types) != lists * n + 3 or len(attrs["weight_decays"]) != n:
        raise ValueError(f"adamw of {n} parameters takes {lists * n + 3} operands and {n} weight decays")
    for i in range(n):
        if len({types[i + j * n].shape for j in range(lists)}) != 1:
            raise ValueError(f"adamw: parameter {i} and its moments and gradient differ in shape")
    return tuple(types[: (lists - 1) * n])


adamw = define_op(
    "adamw",
    _adamw,
    attrs={
        "n": REQUIRED,
        "masters": False,
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-8,
        "weight_decays": REQUIRED,
    },
    infer=_infer_adamw,
    compute_dtype="moments",
)
