"""What an emitted step.py may call: `from mgraph.runtime import v1 as rt`.

These functions are the contract between packages and runtimes: a package written against version 1 keeps working, so a
change of meaning needs a new module. Each one hides a difference between torch versions or devices, or binds a named
mesh axis to the processes of the run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mgraph.runtime import mesh
from mgraph.runtime.attention import attention, attention_grad
from mgraph.runtime.capacity import moe_capacity, moe_capacity_grad, moe_drop_padding
from mgraph.runtime.capacity_layout import (
    even_ends,
    padded_combine,
    padded_combine_grad,
    padded_dispatch,
    swap_blocks,
)
from mgraph.runtime.collectives import (
    Pending,
    all_gather,
    all_gather_start,
    all_reduce,
    all_reduce_start,
    all_to_all,
    all_to_all_start,
    reduce_scatter,
    reduce_scatter_start,
    sendable,
    wait,
)
from mgraph.runtime.dropout import dropout, dropout_part, random
from mgraph.runtime.exact_exchange import exact_places, read_sizes
from mgraph.runtime.expert_exchange import (
    clear_tail,
    expert_places,
    own_choices,
    pack_rows,
    places_overrun,
    unpack_rows,
    within_room,
)
from mgraph.runtime.experts import expert_glu, expert_glu_grad, expert_sum, moe_route_order, real_choice
from mgraph.runtime.joined import glu_grad_joined, joined, rope_join, rope_joined
from mgraph.runtime.kernels import kernels
from mgraph.runtime.later import catch_up, later
from mgraph.runtime.linear import linear, linear_glu
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
    moe_order,
    moe_route,
    moe_route_grad,
    moe_weigh,
    replay_choice,
    stack_choices,
)
from mgraph.runtime.norm import (
    add_rms_norm,
    add_rms_norm_grad,
    layer_norm,
    layer_norm_grad,
    norm_rope,
    norm_rope_grad,
    rms_norm,
    rms_norm_grad,
)
from mgraph.runtime.offload import store_start, to_device_start, to_host_start
from mgraph.runtime.ops import (
    accumulate_each_,
    addmm_,
    all_finite,
    copy_,
    cross_entropy,
    cross_entropy_grad,
    cross_entropy_with_grad,
    device,
    embedding_grad_,
    global_norm,
    glu,
    glu_grad,
    gradient_scale,
    linear_cross_entropy_with_grad_,
    loss_scale_update,
    matmul_add,
    matmul_add_,
    mm_,
    rope,
    rope_table_grad,
    square_sum,
    squared_relu,
    squared_relu_grad,
    zero_,
)
from mgraph.runtime.pad import pad_extent, pad_extent_grad, padded_part
from mgraph.runtime.paged import kv_append_, paged_attention, rope_kv_append_
from mgraph.runtime.repeat import repeat_parts, repeat_parts_grad, repeated_part, repeated_part_grad
from mgraph.runtime.sampling import change_scores, cut_keys, likeliest, perturb, sample, top_logprobs
from mgraph.runtime.vocabulary import (
    by_token,
    cross_entropy_join,
    cross_entropy_part,
    cross_entropy_part_grad,
    embedding_part,
    embedding_part_grad,
    embedding_part_grad_,
)

__all__ = [
    "Pending",
    "accumulate_each_",
    "adamw_",
    "add_rms_norm",
    "add_rms_norm_grad",
    "addmm_",
    "all_finite",
    "all_gather",
    "all_gather_start",
    "all_reduce",
    "all_reduce_start",
    "all_to_all",
    "all_to_all_start",
    "attention",
    "attention_grad",
    "axis_index",
    "axis_share",
    "by_token",
    "catch_up",
    "change_scores",
    "clear_tail",
    "copy_",
    "cross_entropy",
    "cross_entropy_grad",
    "cross_entropy_join",
    "cross_entropy_part",
    "cross_entropy_part_grad",
    "cross_entropy_with_grad",
    "cut_keys",
    "device",
    "dropout",
    "dropout_part",
    "embedding_grad_",
    "embedding_part",
    "embedding_part_grad",
    "embedding_part_grad_",
    "even_ends",
    "exact_places",
    "expert_bias_update_",
    "expert_counts",
    "expert_glu",
    "expert_glu_grad",
    "expert_places",
    "expert_sum",
    "global_norm",
    "glu",
    "glu_grad",
    "glu_grad_joined",
    "gradient_scale",
    "grouped_mm",
    "grouped_outer_",
    "grouped_sum",
    "joined",
    "kernels",
    "kv_append_",
    "later",
    "layer_norm",
    "layer_norm_grad",
    "likeliest",
    "linear",
    "linear_cross_entropy_with_grad_",
    "linear_glu",
    "loss_scale_update",
    "matmul_add",
    "matmul_add_",
    "mm_",
    "moe_capacity",
    "moe_capacity_grad",
    "moe_combine",
    "moe_combine_grad",
    "moe_dispatch",
    "moe_dispatch_grad",
    "moe_drop_padding",
    "moe_order",
    "moe_route",
    "moe_route_grad",
    "moe_route_order",
    "moe_weigh",
    "norm_rope",
    "norm_rope_grad",
    "of_first",
    "own_choices",
    "pack_rows",
    "pad_extent",
    "pad_extent_grad",
    "padded_combine",
    "padded_combine_grad",
    "padded_dispatch",
    "padded_part",
    "paged_attention",
    "part_of",
    "perturb",
    "places_overrun",
    "random",
    "read_sizes",
    "real_choice",
    "reduce_scatter",
    "reduce_scatter_start",
    "repeat_parts",
    "repeat_parts_grad",
    "repeated_part",
    "repeated_part_grad",
    "replay_choice",
    "rms_norm",
    "rms_norm_grad",
    "rope",
    "rope_join",
    "rope_joined",
    "rope_kv_append_",
    "rope_table_grad",
    "sample",
    "sendable",
    "square_sum",
    "squared_relu",
    "squared_relu_grad",
    "stack_choices",
    "store_start",
    "swap_blocks",
    "to_device_start",
    "to_host_start",
    "top_logprobs",
    "unpack_rows",
    "wait",
    "within_room",
    "zero_",
]


def axis_index(axis: str) -> int:
    """This rank's place along `axis`, from 0."""
    return mesh.current().index(axis)


def axis_share(x: Tensor, axis: str) -> Tensor:
    """x divided by the number of ranks along `axis`, a tensor of its own."""
    return x / mesh.current().size(axis)


def of_first(x: Tensor, index: int) -> Tensor:
    """x on the first rank, zeros on the others: a sum over the ranks that is x."""
    return x if index == 0 else torch.zeros_like(x)


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
