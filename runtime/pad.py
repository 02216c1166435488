"""Dims that are longer by zeros, whole and as a rank has them.

A dim is seen as the product of `parts` and what is left, parts major; each part becomes as long as `to` says.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from torch import Tensor


def pad_extent(x: Tensor, *, dim: int, parts: Sequence[int], to: Sequence[int]) -> Tensor:
    """x with zeros at the end of each of its parts along `dim`."""
    return padded_part(x, 0, dim=dim, parts=parts, to=to, ranks=1)


def pad_extent_grad(dy: Tensor, *, dim: int, parts: Sequence[int], to: Sequence[int]) -> Tensor:
    """dy without what belongs to the zeros: the gradient of `pad_extent`."""
    grad: Tensor = dy.unflatten(dim, (*to, -1))
    for place, have in enumerate(parts):
        grad = grad.narrow(dim + place, 0, have)
    return grad.flatten(dim, dim + len(parts))


def padded_part(x: Tensor, index: int, *, dim: int, parts: Sequence[int], to: Sequence[int], ranks: int) -> Tensor:
    """What rank `index` of `ranks` has of `pad_extent(x)` along `dim`: a view where it has no zeros."""
    each, count = x.shape[dim] // math.prod(parts), math.prod(to) // ranks
    runs = list(_runs(index * count, count, parts, to))
    if len(runs) == 1 and runs[0][2] == count:
        return x.narrow(dim, runs[0][1] * each, count * each)
    own = x.new_zeros((*x.shape[:dim], count * each, *x.shape[dim + 1 :]))
    for here, there, length in runs:
        own.narrow(dim, here * each, length * each).copy_(x.narrow(dim, there * each, length * each))
    return own


def _runs(first: int, count: int, parts: Sequence[int], to: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """What `count` places of the padded dim from `first` on have of the other: (place in these, place in the other,
    length), of all parts but the last, which are runs."""
    for at in itertools.product(*(range(n) for n in parts[:-1])):
        there, here = (_place(at, extents) * extents[-1] for extents in (parts, to))
        start, stop = max(first, here), min(first + count, here + parts[-1])
        if start < stop:
            yield start - first, there + start - here, stop - start


def _place(at: Sequence[int], extents: Sequence[int]) -> int:
    """The number of an element in row-major order."""
    place = 0
    for index, extent in zip(at, extents, strict=False):
        place = place * extent + index
    return place
