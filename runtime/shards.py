"""Which parts of a tensor a rank has: from the placement of a state to pieces of the whole.

A state is split over mesh axes, one `Split` after the other: each divides what the ones before left of its dim. What a
rank then holds is its *local* tensor, which is made of *pieces*: boxes that lie together both in it and in the whole.
Mostly that is one; packed halves (`(2 f)` split along f) and zigzag parts are two. Where a dim does not divide, the
local tensors are padded to the same extent, and the padding belongs to no piece.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Factors = tuple[tuple[int, tuple[int, ...]], ...]
"""The factors of dims that have some: (dim, their extents), major first."""


@dataclass(frozen=True, slots=True)
class Split:
    """One division of a dim, or of one of its factors, over a mesh axis; `zigzag`: rank i has parts i and 2n-1-i."""

    axis: str
    dim: int
    factor: int | None = None
    zigzag: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of `sizes` that begins at `whole` in the whole tensor and at `local` in the local one."""

    whole: tuple[int, ...]
    local: tuple[int, ...]
    sizes: tuple[int, ...]

    def of(self, local: Tensor) -> Tensor:
        """The part of the local tensor, a view."""
        return local[tuple(slice(start, start + size) for start, size in zip(self.local, self.sizes, strict=True))]

    def of_whole(self, whole: Tensor) -> Tensor:
        """The same part of the whole tensor, a view."""
        return whole[tuple(slice(start, start + size) for start, size in zip(self.whole, self.sizes, strict=True))]


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank has of a tensor: the shape of its local tensor, and the pieces."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def share_of(
    shape: tuple[int, ...],
    splits: tuple[Split, ...],
    factors: Factors,
    sizes: Mapping[str, int],
    position: Mapping[str, int],
) -> Share:
    """The share of the rank at `position` (axis → index) of a mesh with these axis sizes."""
    parts = tuple((sizes.get(split.axis, 1), position.get(split.axis, 0)) for split in splits)
    extents, runs = [], []
    for dim, extent in enumerate(shape):
        divided = tuple((s, *p) for s, p in zip(splits, parts, strict=True) if s.dim == dim and p[0] > 1)
        length, found = _runs(extent, divided, dict(factors).get(dim, (extent,)))
        extents.append(length)
        runs.append(found)
    pieces = tuple(Piece(*zip(*box, strict=True)) if box else Piece((), (), ()) for box in itertools.product(*runs))
    return Share(tuple(extents), pieces)


@functools.lru_cache(maxsize=4096)
def _runs(
    extent: int, divided: tuple[tuple[Split, int, int], ...], factors: tuple[int, ...]
) -> tuple[int, tuple[tuple[int, int, int], ...]]:
    """The local extent of a dim, and its runs: (start in the whole, start in the local part, length).

    `divided` are its splits, each with the size of the axis and the index on it.
    """
    if not divided:
        return extent, ((0, 0, extent),)
    assert math.prod(factors) == extent, f"the factors {factors} do not make up the extent {extent}"
    index, left = torch.arange(extent), list(factors)
    for split, count, position in divided:
        place = 0 if split.factor is None else split.factor
        outer = math.prod(left[:place])
        rows = index.reshape(outer, -1)
        inner = 1 if split.factor is None else math.prod(left[place + 1 :])
        parts = 2 * count if split.zigzag else count
        part = inner * -(-rows.shape[1] // (inner * parts))
        assert outer == 1 or part * parts == rows.shape[1], f"{split} does not divide the factors {left} evenly"
        padded = torch.nn.functional.pad(rows, (0, part * parts - rows.shape[1]), value=-1).reshape(outer, parts, part)
        taken = [position, parts - 1 - position] if split.zigzag else [position]
        index = padded[:, taken].flatten()
        if split.factor is None:
            left = [len(index)]
        else:
            left[place] = len(taken) * part // inner
    return len(index), _runs_of(index.tolist())


def _runs_of(index: list[int]) -> tuple[tuple[int, int, int], ...]:
    """Maximal runs of consecutive elements of the whole; -1 is padding."""
    runs: list[tuple[int, int, int]] = []
    for local, whole in enumerate(index):
        if whole < 0:
            continue
        if runs and (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]) == (whole, local):
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((whole, local, 1))
    return tuple(runs)
