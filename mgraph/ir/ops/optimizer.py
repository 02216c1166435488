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


def _square_sum(*tensors: Any) -> Any:
    """The sum of the squares of all elements of all tensors, in f32 (f64 for f64): what norms of parts add up to."""
    return sum(promote(t).square().sum() for t in tensors)


square_sum = define_op("square_sum", _square_sum, infer=_infer_global_norm)


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


def _all_finite(*scalars: Any) -> Any:
    """Whether all of some float scalars are finite, bool[]. The norm of all gradients stands for the gradients."""
    import torch

    return torch.isfinite(torch.stack([s.double() for s in scalars])).all()


def _infer_all_finite(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    if any(t.shape for t in types):
        raise ValueError("all_finite takes scalars")
    return (TensorType(DType.BOOL),)


all_finite = define_op("all_finite", _all_finite, infer=_infer_all_finite)


def _loss_scale_update(scale: Any, clean: Any, finite: Any, *, growth: float, backoff: float, interval: int) -> Any:
    """Dynamic loss scaling (as torch.amp.GradScaler): after a step that was not finite the scale shrinks by `backoff`;
    after `interval` clean steps in a row it grows by `growth`, unless that would overflow.

    scale f32[], clean i64[] (steps since the last change), finite bool[] -> the new scale and clean.
    """
    import torch

    counted = clean + 1
    full = counted >= interval
    larger = scale * growth
    grown = torch.where(full & torch.isfinite(larger), larger, scale)
    rest = torch.where(full, torch.zeros_like(counted), counted)
    return torch.where(finite, grown, scale * backoff), torch.where(finite, rest, torch.zeros_like(counted))


def _infer_loss_scale_update(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    return types[0], types[1]


loss_scale_update = define_op(
    "loss_scale_update",
    _loss_scale_update,
    attrs={"growth": 2.0, "backoff": 0.5, "interval": 2000},
    infer=_infer_loss_scale_update,
)


def _adamw(
    *operands: Any,
    n: int,
    masters: bool,
    decoupled: bool,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decays: Sequence[float],
    rates: Sequence[float],
    sums: Sequence[int],
) -> Any:
    """AdamW (Loshchilov & Hutter 2019, as torch.optim.AdamW): for each of n parameters, with g = scale * gradient,
    r = lr * rate, and t the number of this update, from 1,

        w <- w - r * wd * w;  m <- b1 m + (1-b1) g;  v <- b2 v + (1-b2) g^2
        w <- w - r / (1-b1^t) * m / (sqrt(v / (1-b2^t)) + eps)

    Not `decoupled` it is Adam (Kingma & Ba 2015, as torch.optim.Adam): wd * w is added to g instead. Where `finite` is
    false, nothing changes.

    Operands: n weights, n first moments, n second moments, (with `masters`: n params of lower precision, of which the
    weights are the f32 masters), n gradients, then lr, scale, t, finite bool[]. Results: the new weights, first
    moments, second moments, (params: the weights rounded to their dtype). `weight_decays` and `rates` (multipliers of
    lr; empty: all 1) have one number per parameter.

    `sums` has one, too, where the update gives sums of squares of gradients, as `square_sum` (before the scale, finite
    or not): the number of the sum that a gradient counts in, from 0, or -1. Each sum is one more result.
    """
    import torch

    lists = 5 if masters else 4
    weights, firsts, seconds, *low, grads = (operands[i * n : (i + 1) * n] for i in range(lists))
    lr, scale, step, finite = operands[lists * n :]
    t = step.to(lr.dtype)
    correction1, correction2 = 1 - beta1**t, 1 - beta2**t
    results: list[list[Any]] = [[], [], []]
    for w, m, v, g, decay, rate in zip(
        weights, firsts, seconds, grads, weight_decays, rates or (1.0,) * n, strict=True
    ):
        r = lr * rate
        g = g.to(m.dtype) * scale
        g = g if decoupled else g + decay * w
        first = beta1 * m + (1 - beta1) * g
        second = beta2 * v + (1 - beta2) * g * g
        update = (first / correction1) / ((second / correction2).sqrt() + eps)
        weight = (w * (1 - r * decay) if decoupled else w) - r * update
        for made, new, old in zip(results, (weight.to(w.dtype), first, second), (w, m, v), strict=True):
            made.append(torch.where(finite, new, old))
    if low:
        rounded = [w.to(p.dtype) for w, p in zip(results[0], low[0], strict=True)]
        results.append([torch.where(finite, new, old) for new, old in zip(rounded, low[0], strict=True)])
    squares = [_square_sum(*(g for g, k in zip(grads, sums, strict=True) if k == i)) for i in range(_sums(sums))]
    return (*(x for made in results for x in made), *squares)


def _sums(sums: Sequence[int]) -> int:
    """How many sums there are."""
    return max(sums, default=-1) + 1


def _written(attrs: Mapping[str, Any]) -> int:
    """How many operands an update replaces: all but the gradients and scalars."""
    return int(attrs["n"]) * (4 if attrs["masters"] else 3)


def _infer_adamw(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    n, lists = attrs["n"], 5 if attrs["masters"] else 4
    if len(types) != lists * n + 4 or len(attrs["weight_decays"]) != n or len(attrs["rates"]) not in (0, n):
        raise ValueError(
            f"adamw of {n} parameters takes {lists * n + 4} operands, {n} weight decays, and {n} rates or 0"
        )
    for i in range(n):
        if len({types[i + j * n].shape for j in range(lists)}) != 1:
            raise ValueError(f"adamw: parameter {i} and its moments and gradient differ in shape")
    grads, sums = types[(lists - 1) * n : lists * n], attrs["sums"]
    if len(sums) not in (0, n) or {*sums} - {-1} != {*range(_sums(sums))}:
        raise ValueError(f"adamw of {n} parameters has the sums {sums}, not one for each, numbered from 0 (-1: none)")
    counted = [[g for g, k in zip(grads, sums, strict=True) if k == i] for i in range(_sums(sums))]
    return (*types[: (lists - 1) * n], *(_infer_global_norm(of_sum, {})[0] for of_sum in counted))


adamw = define_op(
    "adamw",
    _adamw,
    attrs={
        "n": REQUIRED,
        "masters": False,
        "decoupled": True,
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-8,
        "weight_decays": REQUIRED,
        "rates": (),
        "sums": (),
    },
    infer=_infer_adamw,
    updates=_written,
    compute_dtype="moments",
)
