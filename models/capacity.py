"""Experts with room for so many tokens of a batch, and for none that is padding, as operators of which tracers see one
node each.

Shapes: T tokens, K experts a token, E experts, R rows of pairs of a token and an expert, sorted by expert.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("zoo::within_capacity", mutates_args=())
def within_capacity(
    weights: Tensor, experts: Tensor, num_experts: int, factor: float, keep: str
) -> tuple[Tensor, Tensor]:
    """Each expert keeps ceil(T * K / E * factor) tokens: with `keep` "weight" those of largest weight (of equal ones
    the first), with "position" the first. What it drops has the weight 0, and E instead of its number.

    weights [T, K], experts i64[T, K] -> the same with what is dropped; weights that stay are as they were.
    """
    room = math.ceil(Fraction(str(factor)) * experts.numel() / num_experts)
    flat = experts.flatten()
    chosen = torch.nn.functional.one_hot(flat, num_experts + 1)  # the number E, of no expert, may be among them
    if keep == "weight":
        order = weights.flatten().argsort(descending=True, stable=True)
        place = torch.empty_like(chosen)
        place[order] = chosen[order].cumsum(0)
    else:
        place = chosen.cumsum(0)
    kept = (place.gather(1, flat[:, None]) <= room).view(experts.shape)
    return weights.masked_fill(~kept, 0.0), experts.masked_fill(~kept, num_experts)


@within_capacity.register_fake
def _within_capacity_fake(
    weights: Tensor, experts: Tensor, num_experts: int, factor: float, keep: str
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(weights), torch.empty_like(experts)


def _remember_kept(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.num_experts = inputs[2]


def _to_kept(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor, None, None, None, None]:
    (experts,) = ctx.saved_tensors
    return grad.masked_fill(experts == ctx.num_experts, 0.0), None, None, None, None


within_capacity.register_autograd(_to_kept, setup_context=_remember_kept)


@torch.library.custom_op("zoo::without_padding", mutates_args=())
def without_padding(weights: Tensor, experts: Tensor, real: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Tokens that are not `real`, bool[T], are no expert's: they have the weight 0, and E instead of its number.

    weights [T, K], experts i64[T, K] -> the same with what is dropped; weights that stay are as they were.
    """
    padding = ~real[:, None]
    return weights.masked_fill(padding, 0.0), experts.masked_fill(padding, num_experts)


@without_padding.register_fake
def _without_padding_fake(weights: Tensor, experts: Tensor, real: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(weights), torch.empty_like(experts)


def _remember_real(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[2])


def _to_real(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor, None, None, None]:
    (real,) = ctx.saved_tensors
    return grad.masked_fill(~real[:, None], 0.0), None, None, None


without_padding.register_autograd(_to_real, setup_context=_remember_real)


@torch.library.custom_op("zoo::clear_tail", mutates_args=())
def clear_tail(rows: Tensor, ends: Tensor) -> Tensor:
    """rows [R, N] with zeros from row ends[E - 1] on, whatever was there; ends i32[E]. Its gradient is the same."""
    used = torch.arange(rows.shape[0], device=rows.device) < ends[-1]
    return torch.where(used[:, None], rows, 0.0)


@clear_tail.register_fake
def _clear_tail_fake(rows: Tensor, ends: Tensor) -> Tensor:
    return torch.empty_like(rows)


def _remember_ends(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _clear_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return clear_tail(grad, ctx.saved_tensors[0]), None


clear_tail.register_autograd(_clear_gradient, setup_context=_remember_ends)
