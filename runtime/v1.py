"""What an emitted step.py may call: `from mgraph.runtime import v1 as rt`.

These functions are the contract between packages and runtimes: a package written against version 1 keeps working, so a
change of meaning needs a new module. Each one hides a difference between torch versions or devices, or binds a named
mesh axis to the processes of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mgraph.runtime import mesh
from mgraph.runtime.attention import attention, attention_grad
from mgraph.runtime.dropout import dropout, random
from mgraph.runtime.kernels import kernels
from mgraph.runtime.moe import (
    expert_bias_update_,
    expert_counts,
    grouped_mm,
    grouped_outer_,
    grouped_sum,
    moe_combine,
    moe_combine_grad,
    moe_dispatch,
    moe_dispatch_grad,
    moe_route,
    moe_route_grad,
)
from mgraph.runtime.norm import layer_norm, layer_norm_grad
from mgraph.runtime.ops import (
    all_finite,
    copy_,
    cross_entropy,
    cross_entropy_grad,
    device,
    embedding_grad_,
    global_norm,
    glu,
    glu_grad,
    gradient_scale,
    kv_append_,
    loss_scale_update,
    rope,
    rope_table_grad,
    square_sum,
    squared_relu,
    squared_relu_grad,
    zero_,
)
from mgraph.runtime.vocabulary import (
    cross_entropy_join,
    cross_entropy_part,
    cross_entropy_part_grad,
    embedding_part,
    embedding_part_grad,
    embedding_part_grad_,
)

__all__ = [
    "Pending",
    "adamw_",
    "all_finite",
    "all_gather",
    "all_reduce",
    "all_reduce_start",
    "attention",
    "attention_grad",
    "axis_index",
    "copy_",
    "cross_entropy",
    "cross_entropy_grad",
    "cross_entropy_join",
    "cross_entropy_part",
    "cross_entropy_part_grad",
    "device",
    "dropout",
    "embedding_grad_",
    "embedding_part",
    "embedding_part_grad",
    "embedding_part_grad_",
    "expert_bias_update_",
    "expert_counts",
    "global_norm",
    "glu",
    "glu_grad",
    "gradient_scale",
    "grouped_mm",
    "grouped_outer_",
    "grouped_sum",
    "kernels",
    "kv_append_",
    "layer_norm",
    "layer_norm_grad",
    "loss_scale_update",
    "moe_combine",
    "moe_combine_grad",
    "moe_dispatch",
    "moe_dispatch_grad",
    "moe_route",
    "moe_route_grad",
    "part_of",
    "random",
    "rope",
    "rope_table_grad",
    "square_sum",
    "squared_relu",
    "squared_relu_grad",
    "wait",
    "zero_",
]

_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


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


def all_gather(tensors: Sequence[Tensor], axis: str, dim: int) -> list[Tensor]:
    """Each tensor joined along `dim` with those of the other ranks of `axis`, in their order: one message per dtype."""
    here = mesh.current()
    ranks = here.size(axis)
    made = list(tensors)
    if ranks == 1:
        return made
    by_dtype: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_dtype.setdefault(tensor.dtype, []).append(index)
    for same in by_dtype.values():
        own = torch.cat([tensors[i].reshape(-1) for i in same])
        flat = [torch.empty_like(own) for _ in range(ranks)]
        dist.all_gather(flat, own, group=here.group(axis))
        pieces = [torch.split(part, [tensors[i].numel() for i in same]) for part in flat]
        for place, i in enumerate(same):
            made[i] = torch.cat([part[place].view(tensors[i].shape) for part in pieces], dim)
    return made


def axis_index(axis: str) -> int:
    """This rank's place along `axis`, from 0."""
    return mesh.current().index(axis)


def part_of(x: Tensor, index: int, *, dim: int, parts: int) -> Tensor:
    """Part `index` of `parts` equal ones of x along `dim`; a view."""
    size = x.shape[dim] // parts
    return x.narrow(dim, index * size, size)


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
    scale: Tensor | None = None,
    decoupled: bool = True,
    finite: Tensor | None = None,
) -> None:
    """One AdamW update of `params` and both moments, in place; `step` is the number of this update, from 1.

    Not `decoupled` it is Adam: the weight decay is added to the gradient. Where `finite` (bool[]) is false, nothing
    changes.

    With `scale` (f32[]) the gradients are first multiplied by it, in the same pass over memory; what they hold
    afterwards is undefined.

    Loshchilov and Hutter, "Decoupled weight decay regularization" (2019):

        p *= 1 - lr wd;    m += (1 - b1) (g - m);    v += (1 - b2) (g^2 - v)
        p -= lr / (1 - b1^t) m / (sqrt(v / (1 - b2^t)) + eps)

    One fused kernel for all tensors, in the dtype of the moments: gradients, and parameters that are narrower than
    their moments, are converted for it.
    """
    if not params:
        return
    wide = [param.to(moment.dtype) for param, moment in zip(params, exp_avgs, strict=True)]
    fused = torch._fused_adamw_ if decoupled else torch._fused_adam_
    fused(
        wide,
        [grad.to(moment.dtype) for grad, moment in zip(grads, exp_avgs, strict=True)],
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
        # The kernel divides by what a loss scaler multiplied by.
        grad_scale=None if scale is None else scale.reciprocal(),
        found_inf=None if finite is None else finite.logical_not().to(torch.float32),
    )
    for param, updated in zip(params, wide, strict=True):
        if updated is not param:  # `to` gave a copy
            param.copy_(updated)
