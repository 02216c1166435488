"""Tokens on their way to the experts of other ranks: what is packed for each, unpacked, and left out.

T tokens of this rank, K experts a token, n ranks, R = n*T rows with room for T of each rank. Nothing here waits for the
device, nor do shapes depend on values: a step may be one CUDA graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mgraph.runtime.ops import wide


def expert_places(indices: Tensor, *, num_experts: int, ranks: int) -> Tensor:
    """Where each token lies among those that go to a rank, i64 [T, ranks]; -1 where it does not go. indices i64 [T, K].

    Tokens are counted in their order, each once for a rank, however many of its experts are there; `num_experts` stands
    for an expert that dropped it.
    """
    owner = indices // (num_experts // ranks)
    goes = torch.zeros(indices.shape[0], ranks + 1, dtype=torch.int64, device=indices.device).scatter_(1, owner, 1)[
        :, :-1
    ]
    return torch.where(goes > 0, goes.cumsum(0) - 1, -1)


def pack_rows(x: Tensor, places: Tensor, *, fill: int = 0) -> Tensor:
    """The rows that go to each rank, [n*T, N]: those of x [T, N] by their places i64 [T, n], all others `fill`, if
    anything reads them."""
    tokens, ranks = places.shape
    # Which token lies in each row; those that go nowhere share a last one, which is cut off.
    sources = places.new_full((ranks * tokens + 1,), tokens)
    sources[_rows(places, ranks * tokens)] = torch.arange(tokens, device=x.device)[:, None].expand(tokens, ranks)
    sources = sources[:-1]
    packed = x.index_select(0, sources.clamp(max=tokens - 1))
    return packed.masked_fill_((sources == tokens).view(-1, *[1] * (x.dim() - 1)), fill)


def unpack_rows(y: Tensor, places: Tensor) -> Tensor:
    """The sum of a token's rows over the ranks that it went to, [T, N], in at least f32; y [n*T, N], places [T, n]."""
    rows = _rows(places, 0)
    total: Tensor | None = None
    for rank in range(places.shape[1]):
        part = wide(y.index_select(0, rows[:, rank])).where(places[:, rank, None] >= 0, 0.0)
        total = part if total is None else total.add_(part)
    assert total is not None, "a group has a rank"
    return total.to(y.dtype)


def _rows(places: Tensor, nowhere: int) -> Tensor:
    """The rows that places stand for, i64 [T, n]; `nowhere` for -1."""
    tokens, ranks = places.shape
    return torch.where(places < 0, nowhere, places + torch.arange(ranks, device=places.device) * tokens)


def own_choices(indices: Tensor, index: int | Tensor, *, num_experts: int, ranks: int) -> Tensor:
    """The experts of received rows by their numbers on this rank, number `index` of `ranks`; indices i64 [R, K].

    What is no expert of this rank gets the number that follows those of its own.
    """
    own = num_experts // ranks
    local = indices - index * own
    return torch.where((local >= 0) & (local < own), local, own)


def clear_tail(rows: Tensor, offsets: Tensor) -> Tensor:
    """rows [R, N] with zeros from row offsets[-1] on (i32 [E], cumulative ends): what may be anything there is read."""
    used = torch.arange(rows.shape[0], device=rows.device) < offsets[-1]
    return rows.where(used[:, None], 0.0)
