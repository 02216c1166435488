"""Experts that all have exactly as many rows as their capacity, on torch.

T tokens, K experts a token, E experts with C rows each. Nothing waits for the device, nor do shapes depend on values.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from mgraph.runtime.ops import wide


def padded_dispatch(x: Tensor, indices: Tensor, *, num_experts: int, factor: float) -> tuple[Tensor, Tensor]:
    """Rows [E*C, N], each expert's tokens in their order and zeros behind them, and the row of each pair, i64 [T, K],
    -1 where it was dropped; x [T, N], indices i64 [T, K], E where dropped. C is `ceil(T*K/E * factor)`, at most T."""
    room = min(indices.shape[0], math.ceil(Fraction(str(factor)) * indices.numel() / num_experts))
    rows, flat = num_experts * room, indices.flatten()
    by_expert, order = flat.sort(stable=True)
    # How many of the same expert come before each.
    before = torch.arange(flat.shape[0], device=flat.device) - torch.searchsorted(by_expert, by_expert)
    places = torch.empty_like(flat)
    places[order] = torch.where(by_expert < num_experts, by_expert * room + before, -1)
    # Which pair lies in each row; those that were dropped share a last one, which is cut off.
    pairs = flat.new_full((rows + 1,), -1)
    pairs[places.where(places >= 0, rows)] = torch.arange(flat.shape[0], device=flat.device)
    pairs = pairs[:-1]
    taken = x.index_select(0, pairs.clamp(min=0) // indices.shape[1])
    return taken.masked_fill_((pairs < 0)[:, None], 0), places.view(indices.shape)


def padded_dispatch_grad(drows: Tensor, places: Tensor) -> Tensor:
    """Gradient of `padded_dispatch` for x: the sum of a token's rows of drows [E*C, N]; places [T, K]."""
    return wide(_of_pairs(drows, places)).sum(1).to(drows.dtype)


def _of_pairs(rows: Tensor, places: Tensor) -> Tensor:
    """The row of each pair [T, K, N], zeros where it was dropped."""
    return rows[places.clamp(min=0)].where((places >= 0)[..., None], 0.0)


def even_ends(rows: Tensor, *, num_experts: int) -> Tensor:
    """Cumulative ends i32 [E] of equally many of rows [E*C, N] for each expert."""
    room = rows.shape[0] // num_experts
    return torch.arange(room, rows.shape[0] + 1, room, dtype=torch.int32, device=rows.device)


def padded_combine(rows: Tensor, weights: Tensor, places: Tensor, *, dtype: torch.dtype) -> Tensor:
    """`y[t] = sum over k of weights[t, k] * rows[places[t, k]]` of pairs that were not dropped, [T, N]; products are in
    `dtype`."""
    products = (wide(_of_pairs(rows, places)) * wide(weights)[..., None]).to(dtype)
    return wide(products).sum(1).to(rows.dtype)


def padded_combine_grad(dy: Tensor, rows: Tensor, weights: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `padded_combine` for rows, zeros where there is no token, and weights; dy [T, N]."""
    dots = torch.linalg.vecdot(wide(dy)[:, None], wide(_of_pairs(rows, places)))
    products = (wide(dy)[:, None] * wide(weights)[..., None]).to(rows.dtype)
    drows = rows.new_zeros(rows.shape[0] + 1, rows.shape[1])
    drows[places.where(places >= 0, rows.shape[0]).flatten()] = products.flatten(0, 1)
    return drows[:-1], dots.to(weights.dtype)


def swap_blocks(x: Tensor, *, first: int, second: int) -> Tensor:
    """Rows [first*second*C, N] that lie by a first and then by a second index, by the second and then by the first."""
    blocks: Tensor = x.unflatten(0, (first, second, x.shape[0] // (first * second)))
    return blocks.transpose(0, 1).flatten(0, 2)
