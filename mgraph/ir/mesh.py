"""Mesh arithmetic: axis sizes, and which ranks form the groups of an axis. Axes are major first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mgraph.errors import MgraphError
from mgraph.ir.graph import Axis


def mesh_sizes(mesh: Sequence[Axis], given: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Sizes of the basic axes (those that are not products), major first, for `ranks` ranks.

    `given` overrides declared sizes; an axis declared `*` takes what is left. Raises where the product is not `ranks`.
    """
    basic = [a for a in mesh if not a.of]
    sizes = {a.name: given.get(a.name, a.size) for a in basic}
    fixed = math.prod(s for s in sizes.values() if s is not None)
    open_axes = [name for name, size in sizes.items() if size is None]
    assert len(open_axes) <= 1, f"more than one axis is '*': {open_axes}"
    bound = {name: ranks // fixed if size is None else size for name, size in sizes.items()}
    if math.prod(bound.values()) != ranks and bound:
        text = ",".join(f"{k}={v}" for k, v in bound.items())
        raise MgraphError(
            f"the mesh {text} has {math.prod(bound.values())} ranks, but there are {ranks}",
            hint=f"start {fixed} processes, or a multiple where an axis is '*'",
        )
    return bound


def groups(mesh: Sequence[Axis], sizes: Mapping[str, int], axis: str, ranks: int) -> list[list[int]]:
    """The groups of ranks along an axis (or a product of axes), each in order of the coordinate on it."""
    parts = next((a.of for a in mesh if a.name == axis and a.of), (axis,))
    names = list(sizes)
    made: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = {}
    for rank in range(ranks):
        coordinates = dict(zip(names, coordinates_of(rank, list(sizes.values())), strict=True))
        outside = tuple(c for name, c in coordinates.items() if name not in parts)
        along = tuple(coordinates.get(p, 0) for p in parts)
        made.setdefault(outside, []).append((along, rank))
    return [[rank for _, rank in sorted(members)] for _, members in sorted(made.items())]


def coordinates_of(rank: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The mesh coordinates of a rank, major first."""
    coordinates = []
    for size in reversed(sizes):
        rank, c = divmod(rank, size)
        coordinates.append(c)
    return tuple(reversed(coordinates))


def rank_of(coordinates: Sequence[int], sizes: Sequence[int]) -> int:
    """The rank at mesh coordinates, major first."""
    rank = 0
    for c, size in zip(coordinates, sizes, strict=True):
        rank = rank * size + c
    return rank
