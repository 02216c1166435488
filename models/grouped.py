"""Linear maps over consecutive groups of rows, as one operator so that tracers see one node for all groups.

Shapes: R rows, E groups, N inputs, M outputs. Group e holds the rows from ends[e - 1] (0 for the first) to ends[e].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def _use_library(*tensors: Tensor) -> bool:
    """Whether the grouped kernel of torch takes these: bfloat16 on CUDA, every width a multiple of 16 bytes."""
    return all(t.is_cuda and t.dtype == torch.bfloat16 and t.shape[-1] % 8 == 0 for t in tensors)


def _bounds(ends: Tensor) -> list[tuple[int, int, int]]:
    """(group, first row, end row) of every group that has rows."""
    stops: list[int] = ends.tolist()
    return [(e, a, b) for e, (a, b) in enumerate(zip([0, *stops], stops, strict=False)) if a < b]


@torch.library.custom_op("zoo::grouped_linear", mutates_args=())
def grouped_linear(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """y[r] = rows[r] @ weight[e] for every row r of group e; rows [R, N], weight [E, N, M], ends i32[E] -> [R, M].

    Rows from ends[E - 1] on belong to no group: theirs may be anything.
    """
    if _use_library(rows, weight):
        return F.grouped_mm(rows, weight, offs=ends)
    out = rows.new_empty(rows.shape[0], weight.shape[2])
    for group, start, stop in _bounds(ends):
        torch.mm(rows[start:stop], weight[group], out=out[start:stop])
    return out


@grouped_linear.register_fake
def _grouped_linear_fake(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2])


@torch.library.custom_op("zoo::grouped_linear_weight", mutates_args=())
def grouped_linear_weight(rows: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    """Gradient of the weights: w[e] = rows_e^T @ grad_e; rows [R, N], grad [R, M], ends i32[E] -> [E, N, M]."""
    if _use_library(rows, grad):
        return F.grouped_mm(rows.t(), grad, offs=ends)
    out = rows.new_zeros(ends.shape[0], rows.shape[1], grad.shape[1])
    for group, start, stop in _bounds(ends):
        torch.mm(rows[start:stop].t(), grad[start:stop], out=out[group])
    return out


@grouped_linear_weight.register_fake
def _grouped_linear_weight_fake(rows: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(ends.shape[0], rows.shape[1], grad.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows, weight, ends = ctx.saved_tensors
    grad = grad.contiguous()
    grad_rows = grouped_linear(grad, weight.transpose(1, 2), ends) if ctx.needs_input_grad[0] else None
    grad_weight = grouped_linear_weight(rows, grad, ends) if ctx.needs_input_grad[1] else None
    return grad_rows, grad_weight, None


grouped_linear.register_autograd(_backward, setup_context=_setup_context)
