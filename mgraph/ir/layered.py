"""A simple layered drawing of a directed acyclic graph (Sugiyama, Tagawa and Toda 1981): ranks, orders, places.

Vertices stand one rank below the lowest of their predecessors; within a rank they are ordered by the mean position of
their neighbours, sweeping down and up a few times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SWEEPS = 4
GAP_X, GAP_Y = 24, 40


@dataclass(frozen=True, slots=True)
class Box:
    """Where a vertex stands: left upper corner and size, in pixels."""

    x: float
    y: float
    width: float
    height: float


def layout(sizes: Mapping[str, tuple[float, float]], edges: Sequence[tuple[str, str]]) -> dict[str, Box]:
    """Place every vertex (`sizes` in a topological order); edges go from earlier to later vertices."""
    above: dict[str, list[str]] = {v: [] for v in sizes}
    below: dict[str, list[str]] = {v: [] for v in sizes}
    for start, end in edges:
        above[end].append(start)
        below[start].append(end)
    rank: dict[str, int] = {}
    for vertex in sizes:
        rank[vertex] = max((rank[a] + 1 for a in above[vertex]), default=0)
    rows: list[list[str]] = [[] for _ in range(max(rank.values(), default=-1) + 1)]
    for vertex in sizes:
        rows[rank[vertex]].append(vertex)
    _order(rows, above, below)
    widths = [sum(sizes[v][0] + GAP_X for v in row) for row in rows]
    boxes = {}
    y = float(GAP_Y)
    for row, width in zip(rows, widths, strict=True):
        x = GAP_X + (max(widths) - width) / 2
        for vertex in row:
            boxes[vertex] = Box(x, y, *sizes[vertex])
            x += sizes[vertex][0] + GAP_X
        y += max(sizes[v][1] for v in row) + GAP_Y
    return boxes


def _order(rows: list[list[str]], above: Mapping[str, list[str]], below: Mapping[str, list[str]]) -> None:
    place = {v: index / len(row) for row in rows for index, v in enumerate(row)}
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        for row in rows if down else reversed(rows):
            neighbours = above if down else below
            mean = {v: sum(map(place.__getitem__, n)) / len(n) if (n := neighbours[v]) else place[v] for v in row}
            row.sort(key=mean.__getitem__)
            place.update({v: index / len(row) for index, v in enumerate(row)})
