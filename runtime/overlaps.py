"""What a strided view of a tensor has in common with a box of it.

A tensor of a file is made of strided views of the state's tensors (`weight_layout`), of which a rank holds boxes
(`shards`). What both have is found as boxes of the view, each again a strided view of what the rank holds.

The dims of the view are taken from the widest stride on. One that runs along a dim of the tensor is cut to the box, and
where it runs over the end of that, goes on in the next row. One whose neighbours lie otherwise, or among which those of
later dims lie, is taken index by index.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from mgraph.runtime.shards import Piece


@dataclass(frozen=True)
class View:
    """A view of a contiguous tensor: its shape, where its first element is, and how far apart neighbours are."""

    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]

    def box(self, start: Sequence[int], sizes: tuple[int, ...]) -> View:
        """A box of it."""
        return View(sizes, self.offset + sum(i * s for i, s in zip(start, self.strides, strict=True)), self.strides)


def contiguous(shape: tuple[int, ...]) -> View:
    """All of a tensor."""
    return View(shape, 0, tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape))))


def overlaps(
    view: View, shape: tuple[int, ...], piece: Piece, local: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], View]]:
    """What a view of a tensor of `shape` has in common with a piece of it, which lies in a tensor of the shape `local`:
    where each box begins in the view, and the box as a view of the local tensor. Each element is in one box.
    """
    if piece.sizes == shape:
        yield (0,) * len(view.shape), view
        return
    yield from _Cut(view, shape, piece, local).boxes(0, view.offset, ())


@dataclass(frozen=True)
class _Cut:
    """The work on one view and one piece."""

    view: View
    shape: tuple[int, ...]
    piece: Piece
    local: tuple[int, ...]

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Those of the tensor."""
        return contiguous(self.shape).strides

    @cached_property
    def order(self) -> list[int]:
        """The dims of the view, widest stride first."""
        return sorted(range(len(self.view.shape)), key=lambda dim: -self.view.strides[dim])

    @cached_property
    def reach(self) -> list[int]:
        """By place in the order: how far the dims after it reach together."""
        spans = [(self.view.shape[dim] - 1) * self.view.strides[dim] for dim in self.order]
        return [sum(spans[place + 1 :]) for place in range(len(spans))]

    def boxes(
        self, place: int, base: int, chosen: tuple[tuple[int, int, int], ...]
    ) -> Iterator[tuple[tuple[int, ...], View]]:
        """The boxes for which the first dims, in order, are chosen: (start, size, stride in the local tensor). `base`
        is where in the tensor they begin."""
        if place == len(self.order):
            yield from self._box(base, chosen)
            return
        count, stride = (of[self.order[place]] for of in (self.view.shape, self.view.strides))
        dim = next((d for d, s in enumerate(self.strides) if s <= stride), None)
        if (
            dim is None
            or stride % self.strides[dim]
            or base % self.strides[dim] + self.reach[place] >= self.strides[dim]
        ):
            for index in range(count):
                yield from self.boxes(place + 1, base + index * stride, (*chosen, (index, 1, 0)))
            return
        local_stride = stride // self.strides[dim] * contiguous(self.local).strides[dim]
        for start, size in self._runs(dim, base, count, stride):
            yield from self.boxes(place + 1, base + start * stride, (*chosen, (start, size, local_stride)))

    def _runs(self, dim: int, base: int, count: int, stride: int) -> Iterator[tuple[int, int]]:
        """Start and size of what lies in the piece, of a dim of the view that runs along a dim of the tensor."""
        step, low = stride // self.strides[dim], self.piece.whole[dim]
        high, done = low + self.piece.sizes[dim], 0
        while done < count:
            first = (base + done * stride) // self.strides[dim] % self.shape[dim]
            row = min(count - done, -(-(self.shape[dim] - first) // step))
            begin, end = max(0, -(-(low - first) // step)), min(row, -(-(high - first) // step))
            if begin < end:
                yield done + begin, end - begin
            done += row

    def _box(self, base: int, chosen: tuple[tuple[int, int, int], ...]) -> Iterator[tuple[tuple[int, ...], View]]:
        """The box, where it lies in the piece: dims of the tensor along which no dim of the view runs decide that."""
        places = [base // stride % extent for stride, extent in zip(self.strides, self.shape, strict=True)]
        inside = [place - start for place, start in zip(places, self.piece.whole, strict=True)]
        if all(0 <= place < size for place, size in zip(inside, self.piece.sizes, strict=True)):
            at = [place + start for place, start in zip(inside, self.piece.local, strict=True)]
            by_dim = dict(zip(self.order, chosen, strict=True))
            dims = [by_dim[dim] for dim in range(len(by_dim))]
            offset = contiguous(self.local).box(at, ()).offset
            local = View(tuple(size for _, size, _ in dims), offset, tuple(step for _, _, step in dims))
            yield tuple(start for start, _, _ in dims), local
