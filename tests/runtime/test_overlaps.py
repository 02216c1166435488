"""Boxes that a view of a tensor has in common with pieces of it, against the elements themselves."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mgraph.runtime.overlaps import View, overlaps
from mgraph.runtime.shards import Factors, Split, share_of
from mgraph.runtime.weight_layout import of_view

SHAPE = (4, 6, 8)
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda x: x,
    "one of the first dim": lambda x: x[2],
    "a slice of each": lambda x: x[1:3, 2:5, 3:],
    "turned": lambda x: x.permute(2, 0, 1),
    "every other": lambda x: x[:, 1::2, ::3],
    "two dims as one": lambda x: x.view(24, 8),
    "a part of two dims as one": lambda x: x.view(24, 8)[4:19],
    "every other of two dims as one": lambda x: x.view(24, 8)[1::2].t(),
    "a row over all dims": lambda x: x.view(-1)[5:131],
    "every fifth over all dims": lambda x: x.view(-1)[3::5],
    "a dim as three": lambda x: x.view(4, 6, 2, 2, 2).permute(3, 0, 4, 1, 2),
    "halves by turns": lambda x: x.view(4, 2, 3, 8).transpose(1, 2).select(2, 1),
    "across rows": lambda x: x.view(2, 12, 8)[:, 3:9],
    "one element": lambda x: x[3, 5, 7],
}
PLACEMENTS: dict[str, tuple[tuple[Split, ...], Factors]] = {
    "first": ((Split("a", 0),), ()),
    "twice": ((Split("a", 0), Split("b", 0)), ()),
    "last": ((Split("a", 2),), ()),
    "two dims": ((Split("a", 1), Split("b", 2)), ()),
    "packed": ((Split("a", 1, 1), Split("b", 0)), ((1, (2, 3)),)),
    "padded": ((Split("b", 1), Split("a", 2)), ()),
    "zigzag": ((Split("a", 2, zigzag=True),), ()),
    "whole": ((), ()),
}


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("form", VIEWS)
def test_each_element_that_a_rank_has_of_a_view_is_in_one_box(form: str, placement: str) -> None:
    whole = torch.arange(4 * 6 * 8).view(SHAPE)
    wanted = VIEWS[form](whole)
    view = View(tuple(wanted.shape), int(wanted.storage_offset()), wanted.stride())
    splits, factors = PLACEMENTS[placement]
    sizes = {"a": 3 if placement == "packed" else 2, "b": 4 if placement == "padded" else 2}
    for a, b in itertools.product(range(sizes["a"]), range(sizes["b"])):
        share = share_of(SHAPE, splits, factors, sizes, {"a": a, "b": b})
        local = torch.full(share.shape, -1)
        has = torch.zeros(SHAPE, dtype=torch.bool)
        for piece in share.pieces:
            piece.of(local).copy_(piece.of_whole(whole))
            piece.of_whole(has).fill_(True)
        seen = torch.zeros(view.shape, dtype=torch.int)
        for piece in share.pieces:
            for start, box in overlaps(view, SHAPE, piece, share.shape):
                place = tuple(slice(first, first + size) for first, size in zip(start, box.shape, strict=True))
                assert torch.equal(of_view(local, box), wanted[place])
                seen[place] += 1
        assert torch.equal(seen, VIEWS[form](has).int())


def test_what_runs_along_dims_is_one_box() -> None:
    """An expert's weight, and its transpose, are cut once, not element by element."""
    share = share_of(SHAPE, (Split("a", 2),), (), {"a": 2}, {"a": 1})
    for view in (
        View((6, 8), 48, (8, 1)),
        View((8, 6), 48, (1, 8)),
        View((24, 8), 0, (8, 1)),
        View((4, 3), 1, (48, 2)),
    ):
        found = list(overlaps(view, SHAPE, share.pieces[0], share.shape))
        assert len(found) == (4 if view.shape == (24, 8) else 1)
