"""Experts that all have exactly as many rows as their capacity, on torch.

T tokens, K experts a token, E experts with C rows each. Nothing waits for the device, nor do shapes depend on values.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from mgraph.errors import PackageError
from mgraph.runtime.ops import wide


def padded_dispatch(x: Tensor, indices: Tensor, *, num_experts: int, factor: float) -> tuple[Tensor, Tensor]:
    """Rows [E*C, N], each expert's tokens in their order and zeros behind them, and the row of each pair, i64 [T, K],
    -1 where it was dropped; x [T, N], indices i64 [T, K], E where dropped. C is `ceil(T*K/E * factor)`, at most T.

    Experts of a token differ, so that no expert has more. Raises PackageError on the CPU, where a look costs nothing,
    if one has; elsewhere what finds no room is dropped.
    """
    room = min(indices.shape[0], math.ceil(Fraction(str(factor)) * indices.numel() / num_experts))
    rows, flat = num_experts * room, indices.flatten()
    by_expert, order = flat.sort(stable=True)
    # How many of the same expert come before each.
    before = torch.arange(flat.shape[0], device=flat.device) - torch.searchsorted(by_expert, by_expert)
    real = by_expert < num_experts
    if flat.device.type == "cpu" and bool((real & (before >= room)).any()):
        raise PackageError(
            f"an expert keeps more than {room} rows, which is its capacity: a router chose it twice for a token",
            hint="mend the router of the model, or compile without --pad-to-capacity",
        )
    places = torch.empty_like(flat)
    places[order] = torch.where(real & (before < room), by_expert * room + before, -1)
    # Which pair lies in each row; those that were dropped share a last one, which is cut off.
    pairs = flat.new_full((rows + 1,), -1)
    pairs[places.where(places >= 0, rows)] = torch.arange(flat.shape[0], device=flat.device)
    pairs = pairs[:-1]
    taken = x.index_select(0, pairs.clamp(min=0) // indices.shape[1])
    return taken.masked_fill_((pairs < 0)[:, None], 0), places.view(indices.shape)


def even_ends(rows: Tensor, *, num_experts: int) -> Tensor:
    """Cumulative ends i32 [E] of equally many of rows [E*C, N] for each expert."""
    room = rows.shape[0] // num_experts
    return torch.arange(room, rows.shape[0] + 1, room, dtype=torch.int32, device=rows.device)


def padded_combine(rows: Tensor, weights: Tensor, places: Tensor, *, dtype: torch.dtype) -> Tensor:
    """`y[t] = sum over k of weights[t, k] * rows[places[t, k]]` of pairs that were not dropped, [T, N]; products are in
    `dtype`."""
    total: Tensor | None = None
    for choice in range(places.shape[1]):
        own = (wide(_of_choice(rows, places, choice)) * wide(weights[:, choice, None])).to(dtype)
        total = wide(own) if total is None else total.add_(own)
    assert total is not None, "a token has a choice"
    return total.to(rows.dtype)


def padded_combine_grad(dy: Tensor, rows: Tensor, weights: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `padded_combine` for rows, zeros where there is no token, and weights; dy [T, N]."""
    drows, dots = rows.new_zeros(rows.shape[0] + 1, rows.shape[1]), torch.empty_like(weights)
    for choice in range(places.shape[1]):
        place = places[:, choice]
        dots[:, choice] = torch.linalg.vecdot(wide(dy), wide(_of_choice(rows, places, choice))).to(weights.dtype)
        products = (wide(dy) * wide(weights[:, choice, None])).to(rows.dtype)
        # What was dropped is written to a last row, which is cut off.
        drows.index_copy_(0, place.where(place >= 0, rows.shape[0]), products)
    return drows[:-1], dots


def _of_choice(rows: Tensor, places: Tensor, choice: int) -> Tensor:
    """The rows of one choice of each token [T, N], zeros where it was dropped."""
    place = places[:, choice]
    return rows.index_select(0, place.clamp(min=0)).where(place[:, None] >= 0, 0.0)


def swap_blocks(x: Tensor, *, first: int, second: int) -> Tensor:
    """Rows [first*second*C, N] that lie by a first and then by a second index, by the second and then by the first."""
    blocks: Tensor = x.unflatten(0, (first, second, x.shape[0] // (first * second)))
    return blocks.transpose(0, 1).flatten(0, 2)
