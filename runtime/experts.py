"""Experts on torch, as the fused kernels of a GPU compute them: order of rows, gated units of taken rows, gradients.

T tokens, E experts, K experts a token, R = T * K rows; row r is of pair `order[r] = t * K + k`, and the rows of expert
e end at `offsets[e]`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mgraph.runtime.moe import grouped_mm, moe_combine, moe_order, moe_route, of_experts
from mgraph.runtime.ops import glu, glu_grad, wide


def real_choice(indices: Tensor, starts: Tensor, *, num_experts: int) -> Tensor:
    """indices i64 [T, K], with E for the tokens from starts[-1] on (i32 [R+1]), which only fill a step up."""
    tokens = torch.arange(indices.shape[0], dtype=starts.dtype, device=indices.device)
    return indices.masked_fill((tokens >= starts[-1])[:, None], num_experts)


def moe_route_order(logits: Tensor, *more: Tensor, ended: bool = False, **options: Any) -> tuple[Tensor, ...]:
    """weights, indices, order and offsets: `moe_route` with its options, and `moe_order`; logits [T, E], perhaps a bias
    [E], and if `ended` starts, for an order of the `real_choice`."""
    weights, indices = moe_route(logits, *more[: len(more) - ended], **options)
    chosen = real_choice(indices, more[-1], num_experts=logits.shape[1]) if ended else indices
    return weights, indices, *moe_order(chosen, num_experts=logits.shape[1], others=ended)


def expert_glu(
    x: Tensor,
    order: Tensor,
    offsets: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    *,
    top_k: int,
    act: str,
    alpha: float = 1.702,
    limit: float = 0.0,
    offset: float = 0.0,
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor, Tensor]:
    """y, gate and up [R, F] of x [T, N] and matrices [E, N, F]: `y[r] = act(gate[r]) * (up[r] + offset)` of
    `gate[r] = x[t] @ gate_weight[e]`, likewise up; with a limit, gate is cut to at most that and up to within it.
    `biases` [E, F] are added to gate and up."""
    rows = x.index_select(0, order // top_k)
    gate, up = (grouped_mm(rows, w, offsets, b) for w, b in zip((gate_weight, up_weight), biases, strict=True))
    return glu(gate, up, act=act, alpha=alpha, limit=limit, offset=offset), gate, up


def expert_sum(
    rows: Tensor,
    weight: Tensor,
    weights: Tensor,
    order: Tensor,
    offsets: Tensor,
    *,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    ended: bool = False,
) -> Tensor:
    """`y[t] = sum over k of weights[t, k] * (rows[r] @ weight[e] + bias[e])` for the rows r of token t and their
    experts e, [T, N]; products are in `dtype`. With `ended` rows past the last offset count as 0."""
    out = grouped_mm(rows, weight, offsets, bias)
    return moe_combine(out, weights, order, offsets if ended else None, dtype=dtype)


def expert_glu_grad(
    dy: Tensor,
    weights: Tensor,
    order: Tensor,
    offsets: Tensor,
    weight: Tensor,
    gate: Tensor,
    up: Tensor,
    *,
    top_k: int,
    act: str,
    alpha: float = 1.702,
    limit: float = 0.0,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dgate, dup and weighted y, all [R, F], and dweights [T, K]; dy [T, N] is the gradient of a token's weighted sum
    of `y[r] @ w[e]`, and weight [E, N, F] holds the transposed w."""
    products = wide(grouped_mm(dy.index_select(0, order // top_k), weight, offsets))
    share = wide(weights).flatten()[order, None]
    y = wide(glu(gate, up, act=act, alpha=alpha, limit=limit, offset=offset))
    grad = (products * share).to(gate.dtype)
    dgate, dup = glu_grad(grad, gate, up, act=act, alpha=alpha, limit=limit, offset=offset)
    dweights = torch.empty_like(weights)
    dweights.view(-1)[order] = of_experts(torch.linalg.vecdot(products, y), offsets).to(weights.dtype)
    return dgate, dup, (y * share).to(gate.dtype), dweights
