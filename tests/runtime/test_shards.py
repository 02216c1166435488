"""Shares of ranks against slices written by hand, and tilings of the whole by the pieces of all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mgraph.runtime.shards import Factors, Share, Split, share_of

SIZES = {"fsdp": 2, "tp": 3}


def local_tensor(whole: Tensor, share: Share) -> Tensor:
    """The local tensor of a share, its padding -1."""
    local = torch.full(share.shape, -1, dtype=whole.dtype)
    for piece in share.pieces:
        box = tuple(slice(a, a + n) for a, n in zip(piece.whole, piece.sizes, strict=True))
        piece.of(local).copy_(whole[box])
    return local


def at(fsdp: int, tp: int) -> Mapping[str, int]:
    return {"fsdp": fsdp, "tp": tp}


@pytest.mark.parametrize(("fsdp", "tp"), list(itertools.product(range(2), range(3))))
def test_shares_are_slices(fsdp: int, tp: int) -> None:
    whole = torch.arange(12 * 18).reshape(12, 18)

    def found(*splits: Split, factors: Factors = ()) -> Tensor:
        return local_tensor(whole, share_of((12, 18), splits, factors, SIZES, at(fsdp, tp)))

    assert torch.equal(found(), whole)
    assert torch.equal(found(Split("dp", 0)), whole)
    assert torch.equal(found(Split("tp", 1)), whole[:, 6 * tp : 6 * tp + 6])
    assert torch.equal(found(Split("tp", 0), Split("fsdp", 1)), whole[4 * tp : 4 * tp + 4, 9 * fsdp : 9 * fsdp + 9])
    # One dim over two axes: what tp left is divided by fsdp, and the other way round.
    assert torch.equal(found(Split("tp", 0), Split("fsdp", 0)), whole.chunk(3)[tp].chunk(2)[fsdp])
    assert torch.equal(found(Split("fsdp", 0), Split("tp", 0)), whole.chunk(2)[fsdp].chunk(3)[tp])
    # Packed halves: each has its own part.
    halves = whole.reshape(2, 6, 18)[:, 2 * tp : 2 * tp + 2].reshape(4, 18)
    assert torch.equal(found(Split("tp", 0, factor=1), factors=((0, (2, 6)),)), halves)
    both = halves.reshape(2, 2, 18)[:, fsdp].reshape(2, 18)
    assert torch.equal(found(Split("tp", 0, factor=1), Split("fsdp", 0, factor=1), factors=((0, (2, 6)),)), both)
    assert torch.equal(found(Split("fsdp", 0, factor=0), factors=((0, (2, 6)),)), whole.chunk(2)[fsdp])
    first, last = whole.chunk(6)[tp], whole.chunk(6)[5 - tp]
    assert torch.equal(found(Split("tp", 0, zigzag=True)), torch.cat([first, last]))


def test_what_does_not_divide_is_padded() -> None:
    whole = torch.arange(7)
    parts = [local_tensor(whole, share_of((7,), (Split("tp", 0),), (), SIZES, at(0, tp))) for tp in range(3)]
    assert [part.tolist() for part in parts] == [[0, 1, 2], [3, 4, 5], [6, -1, -1]]
    empty = share_of((2,), (Split("tp", 0),), (), SIZES, at(0, 2))
    assert empty.shape == (1,) and empty.pieces == ()
    heads = [
        local_tensor(torch.arange(8), share_of((8,), (Split("tp", 0, 0),), ((0, (4, 2)),), SIZES, at(0, tp)))
        for tp in range(3)
    ]
    assert [part.tolist() for part in heads] == [[0, 1, 2, 3], [4, 5, 6, 7], [-1, -1, -1, -1]]


def test_scalars_and_empty_tensors_are_one_piece() -> None:
    assert [p.sizes for p in share_of((), (), (), SIZES, at(0, 0)).pieces] == [()]
    assert [p.sizes for p in share_of((0, 4), (), (), SIZES, at(0, 0)).pieces] == [(0, 4)]


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    data=st.data(),
    sizes=st.fixed_dictionaries({"a": st.integers(1, 4), "b": st.integers(1, 3)}),
)
def test_pieces_of_all_ranks_tile_the_whole(shape: list[int], data: st.DataObject, sizes: dict[str, int]) -> None:
    dims = st.integers(0, len(shape) - 1)
    splits = tuple(Split(axis, data.draw(dims), zigzag=data.draw(st.booleans())) for axis in ("a", "b"))
    covered = torch.zeros(shape, dtype=torch.int)
    shapes = set()
    for a, b in itertools.product(range(sizes["a"]), range(sizes["b"])):
        share = share_of(tuple(shape), splits, (), sizes, {"a": a, "b": b})
        shapes.add(share.shape)
        inside = torch.zeros(share.shape, dtype=torch.int)
        for piece in share.pieces:
            covered[tuple(slice(w, w + n) for w, n in zip(piece.whole, piece.sizes, strict=True))] += 1
            piece.of(inside).add_(1)
        assert bool((inside <= 1).all())
    assert bool((covered == 1).all()) and len(shapes) == 1
