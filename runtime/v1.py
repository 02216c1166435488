"""What an emitted step.py may call: `from mgraph.runtime import v1 as rt`.

These functions are the contract between packages and runtimes: a package written against version 1 keeps working, so a
change of meaning needs a new module. Each one hides a difference between torch versions or devices, or binds a named
mesh axis to the processes of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mgraph.runtime import mesh
from mgraph.runtime.kernels import kernels

__all__ = ["Pending", "adamw_", "all_reduce", "all_reduce_start", "grouped_mm", "kernels", "wait"]

_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# The public name came after the private one; both take the same arguments.
_grouped_mm: Any = getattr(F, "grouped_mm", None) or torch._grouped_mm
_GROUPED_ALIGNMENT = 16  # bytes between rows that the fused grouped product asks for
_GROUPED_DTYPES = {"cuda": {torch.bfloat16}, "cpu": {torch.bfloat16, torch.float16, torch.float32}}


@dataclass(frozen=True)
class Pending:
    """Tensors whose collective is under way; `wait` gives them back."""

    tensors: list[Tensor]
    # Each flat buffer with the works that fill it and the tensors it is scattered to (none: reduced in place).
    buffers: list[tuple[Tensor, dist.Work, list[Tensor]]]


def all_reduce(tensors: Sequence[Tensor], axis: str, op: str = "sum") -> list[Tensor]:
    """Reduce each tensor over the ranks of `axis`, in place; returns the same tensors. `op` is sum, max or min."""
    return wait(all_reduce_start(tensors, axis, op))


def all_reduce_start(tensors: Sequence[Tensor], axis: str, op: str = "sum") -> Pending:
    """Begin `all_reduce`: one message per dtype. The tensors must not be touched before `wait`."""
    here = mesh.current()
    pending = Pending(list(tensors), [])
    if here.size(axis) == 1:
        return pending
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for same in by_dtype.values():
        alone = len(same) == 1 and same[0].is_contiguous()
        buffer = same[0] if alone else torch.cat([tensor.reshape(-1) for tensor in same])
        work = dist.all_reduce(buffer, _REDUCTIONS[op], group=here.group(axis), async_op=True)
        assert work is not None, "an asynchronous all-reduce gives a work handle"
        pending.buffers.append((buffer, work, [] if alone else same))
    return pending


def wait(pending: Pending) -> list[Tensor]:
    """Finish a collective; the tensors it was started with, now reduced."""
    for buffer, work, targets in pending.buffers:
        work.wait()
        if targets:
            pieces = torch.split(buffer, [target.numel() for target in targets])
            for target, piece in zip(targets, pieces, strict=True):
                target.copy_(piece.view_as(target))
    return pending.tensors


def grouped_mm(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Matrix products of consecutive groups of rows; `offsets` i32[E] holds the cumulative end of each group.

    With weight [E, K, N], rows [R, K] give [R, N]: `out[r] = rows[r] @ weight[e]` for the group e that r lies in; rows
    past the last end are zero or undefined. With weight [R, N], rows [K, R] (as in a weight gradient) give [E, K, N]:
    `out[e] = rows[:, group e] @ weight[group e]`.

    Operands may be transposed views. One fused call where torch has one for the dtype and strides, else one product
    per group.
    """
    aligned = all(_is_aligned(operand) for operand in (rows, weight))
    if aligned and rows.dtype in _GROUPED_DTYPES.get(rows.device.type, set()):
        fused: Tensor = _grouped_mm(rows, weight, offs=offsets)
        return fused
    ends = offsets.tolist()
    starts = [0, *ends[:-1]]
    if weight.dim() == 2:
        stacked = rows.new_empty(len(ends), rows.shape[0], weight.shape[1])
        for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
            torch.mm(rows[:, start:end], weight[start:end], out=stacked[index])
        return stacked
    out = rows.new_empty(rows.shape[0], weight.shape[2])
    for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
        torch.mm(rows[start:end], weight[index], out=out[start:end])
    return out


def _is_aligned(operand: Tensor) -> bool:
    """Whether the last two dims are laid out densely one way round, with 16-byte distances and start."""
    step = _GROUPED_ALIGNMENT // operand.element_size()
    inner, outer = sorted(operand.stride()[-2:])
    batch = operand.stride()[:-2]
    return (
        operand.numel() > 0
        and inner == 1
        and outer % step == 0
        and all(stride % step == 0 for stride in batch)
        and operand.storage_offset() % step == 0
    )


def adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    step: Tensor,
    lr: Tensor | float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """One AdamW update of `params` and both moments, in place; `step` is the number of this update, from 1.

    Loshchilov and Hutter, "Decoupled weight decay regularization" (2019):

        p *= 1 - lr wd;    m += (1 - b1) (g - m);    v += (1 - b2) (g^2 - v)
        p -= lr / (1 - b1^t) m / (sqrt(v / (1 - b2^t)) + eps)

    One fused kernel for all tensors where dtypes agree; gradients and moments of another dtype than the parameters
    take torch's list operations.
    """
    if not params:
        return
    if len({tensor.dtype for tensors in (params, grads, exp_avgs, exp_avg_sqs) for tensor in tensors}) > 1:
        _adamw_lists(params, grads, exp_avgs, exp_avg_sqs, float(step), float(lr), beta1, beta2, eps, weight_decay)
        return
    torch._fused_adamw_(
        list(params),
        list(grads),
        list(exp_avgs),
        list(exp_avg_sqs),
        [],
        [step.to(torch.float32)] * len(params),
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )


def _adamw_lists(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    step: float,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """The update of `adamw_` in the dtype of the moments, tensor lists at a time."""
    params, exp_avgs, exp_avg_sqs = list(params), list(exp_avgs), list(exp_avg_sqs)
    grads = [grad.to(moment.dtype) for grad, moment in zip(grads, exp_avgs, strict=True)]
    torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - beta2)
    denominators = torch._foreach_sqrt(exp_avg_sqs)
    torch._foreach_div_(denominators, (1 - beta2**step) ** 0.5)
    torch._foreach_add_(denominators, eps)
    updates = torch._foreach_div(exp_avgs, denominators)
    wide = [param.to(update.dtype) for param, update in zip(params, updates, strict=True)]
    decayed = torch._foreach_mul(wide, 1 - lr * weight_decay)
    torch._foreach_add_(decayed, updates, alpha=-lr / (1 - beta1**step))
    torch._foreach_copy_(params, decayed)
