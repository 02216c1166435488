"""Tokens on their way to the experts of other ranks: what is packed for each, unpacked, and left out.

T tokens of this rank, K experts a token, n ranks, R = n*T rows with room for T of each rank. Nothing here waits for the
device, nor do shapes depend on values: a step may be one CUDA graph.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from mgraph.runtime.moe import check_choices
from mgraph.runtime.ops import wide


def expert_places(indices: Tensor, *, num_experts: int, ranks: int) -> Tensor:
    """Where each token lies among those that go to a rank, i64 [T, ranks]; -1 where it does not go. indices i64 [T, K].

    Tokens are counted in their order, each once for a rank, however many of its experts are there; `num_experts` stands
    for an expert that dropped it. Raises PackageError on the CPU for the number of an expert that there is not;
    elsewhere it drops the token, as `num_experts` does.
    """
    check_choices(indices, num_experts)
    owner = indices.clamp(-1, num_experts).remainder(num_experts + 1) // (num_experts // ranks)  # -1 becomes E
    goes = torch.zeros(indices.shape[0], ranks + 1, dtype=torch.int64, device=indices.device).scatter_(1, owner, 1)[
        :, :-1
    ]
    return torch.where(goes > 0, goes.cumsum(0) - 1, -1)


def within_room(places: Tensor, *, part: float) -> Tensor:
    """places i64 [T, n] with -1 for tokens that a rank has no room for: of `part` of T tokens from each rank."""
    return torch.where(places < _room(places.shape[0], part), places, -1)


def places_overrun(places: Tensor, index: int, *, part: float) -> Tensor:
    """How many tokens of this rank, number `index` of n, find no room, at its place of i64 [n]; 0 elsewhere."""
    ranks = torch.arange(places.shape[1], device=places.device)
    return torch.where(ranks == index, (places >= _room(places.shape[0], part)).sum(), 0)


def _room(tokens: int, part: float) -> int:
    return math.ceil(Fraction(str(part)) * tokens)


def pack_rows(x: Tensor, places: Tensor, *, fill: int = 0, part: float = 1.0) -> Tensor:
    """The rows that go to each rank, [n*C, N], where C is T, or `part` of it rounded up: those of x [T, N] by their
    places i64 [T, n], all others `fill`, if anything reads them."""
    tokens, ranks = places.shape
    rows = ranks * _room(tokens, part)
    # Which token lies in each row; those that go nowhere share a last one, which is cut off.
    sources = places.new_full((rows + 1,), tokens)
    sources[_rows(places, rows, part)] = torch.arange(tokens, device=x.device)[:, None].expand(tokens, ranks)
    sources = sources[:-1]
    packed = x.index_select(0, sources.clamp(max=tokens - 1))
    return packed.masked_fill_((sources == tokens).view(-1, *[1] * (x.dim() - 1)), fill)


def unpack_rows(y: Tensor, places: Tensor, *, part: float = 1.0) -> Tensor:
    """The sum of a token's rows over the ranks that it went to, [T, N], in at least f32; y [n*C, N], places [T, n].

    With a `part` of 0 places count all rows, of which there may be any number.
    """
    if not y.shape[0]:
        return y.new_zeros(places.shape[0], y.shape[1])
    rows = _rows(places, 0, part)
    total: Tensor | None = None
    for rank in range(places.shape[1]):
        own = wide(y.index_select(0, rows[:, rank])).where(places[:, rank, None] >= 0, 0.0)
        total = own if total is None else total.add_(own)
    assert total is not None, "a group has a rank"
    return total.to(y.dtype)


def _rows(places: Tensor, nowhere: int, part: float) -> Tensor:
    """The rows that places stand for, i64 [T, n]; `nowhere` for -1."""
    tokens, ranks = places.shape
    return torch.where(places < 0, nowhere, places + torch.arange(ranks, device=places.device) * _room(tokens, part))


def own_choices(indices: Tensor, index: int | Tensor, *, num_experts: int, ranks: int, used: bool = False) -> Tensor:
    """The experts of received rows by their numbers on this rank, number `index` of `ranks`; indices i64 [R, K].

    What is no expert of this rank gets the number that follows those of its own. With `used` every row is a token's:
    the number of an expert that there is not raises PackageError on the CPU.
    """
    if used:
        check_choices(indices, num_experts)
    own = num_experts // ranks
    local = indices - index * own
    return torch.where((local >= 0) & (local < own), local, own)


def clear_tail(rows: Tensor, offsets: Tensor) -> Tensor:
    """rows [R, N] with zeros from row offsets[-1] on (i32 [E], cumulative ends), for packages of before: ops of today
    read nothing there."""
    used = torch.arange(rows.shape[0], device=rows.device) < offsets[-1]
    return rows.where(used[:, None], 0.0)
