"""The memory of a rank over a step as an SVG picture, and as one HTML page with the tables. No library needed.

The state lies at the bottom, and on it what each node finds there, by kind; the peak is marked. Columns that a pointer
rests on say which node it is and what there is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from mgraph.codegen.memory import KINDS, Point
from mgraph.passes.recompute import size_text

COLOURS = {
    "parameters": "#4e79a7",
    "gradients of parameters": "#76b7b2",
    "optimizer state": "#59a14f",
    "buffers and scalars": "#8cd17d",
    "cache": "#8cd17d",
    "inputs": "#bab0ac",
    "activations": "#f1ce63",
    "gradients": "#f28e2b",
    "optimizer": "#b6992d",
    "brought": "#b07aa1",
    "workspace": "#e15759",
}
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 960, 360, 70, 40, 60
_COLUMNS = 400
"""The most columns: of more nodes, neighbours share one, which shows the highest."""


@dataclass(frozen=True)
class Bands:
    """What is drawn: bytes of the state by kind, and the points of one entry after the other."""

    state: Mapping[str, int]
    entries: Mapping[str, Sequence[Point]]

    @property
    def labels(self) -> tuple[str, ...]:
        """The bands from the bottom: kinds of state, then of what is there for a while."""
        return (*(_STATE.get(label, label) for label in self.state), *KINDS)

    def heights(self, point: Point) -> tuple[int, ...]:
        """Bytes of each band at a point."""
        return (*self.state.values(), *point.bytes)


_STATE = {"gradients": "gradients of parameters"}


def to_svg(title: str, bands: Bands) -> str:
    """The picture."""
    columns = [(entry, point) for entry, points in bands.entries.items() for point in _thinned(points, bands)]
    base = sum(bands.state.values())
    highest = max((base + point.total for _, point in columns), default=base)
    scale = _HEIGHT / max(1, highest)
    step = _WIDTH / max(1, len(columns))
    parts = [_frame(title, highest, scale)]
    parts += _areas(bands, columns, scale, step)
    parts += _entries(columns, step)
    parts += [_column(bands, entry, point, index * step, step) for index, (entry, point) in enumerate(columns)]
    if columns:
        index = max(range(len(columns)), key=lambda i: columns[i][1].total)
        parts.append(_peak(columns[index][1], base, (index + 0.5) * step, scale))
    parts += _legend(bands, columns)
    width, height = _LEFT + _WIDTH + 240, _TOP + _HEIGHT + _BOTTOM
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="12">{"".join(parts)}</svg>\n'
    )


def to_html(title: str, bands: Bands, tables: str) -> str:
    """One self-contained page: the picture, then the tables."""
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/><title>{escape(title)}</title></head>'
        f'<body style="font: 14px sans-serif; margin: 16px">{to_svg(title, bands)}'
        f"<pre>{escape(tables)}</pre></body></html>\n"
    )


def _thinned(points: Sequence[Point], bands: Bands) -> list[Point]:
    """At most so many points that all entries have room, of neighbours the highest."""
    total = sum(map(len, bands.entries.values()))
    width = max(1, -(-total // _COLUMNS))
    return [max(points[i : i + width], key=lambda p: p.total) for i in range(0, len(points), width)]


def _frame(title: str, highest: int, scale: float) -> str:
    """Title and lines of equal memory, at four heights."""
    lines = [f'<text x="{_LEFT}" y="20" font-size="14">{escape(title)}</text>']
    for quarter in range(5):
        y = _TOP + _HEIGHT - highest * quarter / 4 * scale
        lines.append(
            f'<line x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{size_text(highest * quarter // 4)}</text>'
        )
    return "".join(lines)


def _areas(bands: Bands, columns: Sequence[tuple[str, Point]], scale: float, step: float) -> list[str]:
    """One shape a band, on the one below."""
    below = [0] * len(columns)
    heights = [bands.heights(point) for _, point in columns]
    shapes = []
    for number, label in enumerate(bands.labels):
        above = [low + height[number] for low, height in zip(below, heights, strict=True)]
        if above != below:
            upper = [f"{x:.1f},{_y(v, scale):.1f}" for i, v in enumerate(above) for x in _edges(i, step)]
            lower = [f"{x:.1f},{_y(v, scale):.1f}" for i, v in enumerate(below) for x in _edges(i, step)]
            shapes.append(f'<polygon class="band" points="{" ".join([*upper, *reversed(lower)])}" '
                          f'fill="{COLOURS[label]}"><title>{label}</title></polygon>')  # fmt: skip
        below = above
    return shapes


def _edges(index: int, step: float) -> tuple[float, float]:
    return _LEFT + index * step, _LEFT + (index + 1) * step


def _y(value: int, scale: float) -> float:
    return _TOP + _HEIGHT - value * scale


def _entries(columns: Sequence[tuple[str, Point]], step: float) -> list[str]:
    """The name of each entry below its part."""
    names = [entry for entry, _ in columns]
    made = []
    for name in dict.fromkeys(names):
        x = _LEFT + names.index(name) * step
        made.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_TOP + _HEIGHT + 20}" stroke="#333"/>'
            f'<text x="{x + 4:.1f}" y="{_TOP + _HEIGHT + 16}">{escape(name)}</text>'
        )
    return made


def _column(bands: Bands, entry: str, point: Point, x: float, step: float) -> str:
    """What a pointer finds over one column."""
    kinds = zip(KINDS, point.bytes, strict=True)
    told = [f"{entry}: @{point.function} %{point.node.id} = {point.node.op}"]
    told += [f"{size_text(sum(bands.state.values()) + point.total)} in all"]
    told += [f"{label}: {size_text(size)}" for label, size in kinds if size]
    if point.node.origin.file:
        told.append(str(point.node.origin))
    return (
        f'<rect class="column" x="{_LEFT + x:.1f}" y="{_TOP}" width="{step:.2f}" height="{_HEIGHT}" fill="transparent">'
        f"<title>{escape(chr(10).join(told))}</title></rect>"
    )


def _peak(point: Point, base: int, x: float, scale: float) -> str:
    y = _y(base + point.total, scale)
    label = f"{size_text(base + point.total)} at @{point.function} %{point.node.id}"
    anchor = "end" if x > _WIDTH / 2 else "start"
    return (
        f'<circle cx="{_LEFT + x:.1f}" cy="{y:.1f}" r="4" fill="#c00"/>'
        f'<text x="{_LEFT + x:.1f}" y="{y - 8:.1f}" text-anchor="{anchor}" fill="#c00">{escape(label)}</text>'
    )


def _legend(bands: Bands, columns: Sequence[tuple[str, Point]]) -> list[str]:
    """The bands that there are, from the top, each with its most bytes."""
    rows: list[str] = []
    heights = [bands.heights(point) for _, point in columns]
    for number, label in reversed(list(enumerate(bands.labels))):
        most = max((height[number] for height in heights), default=0)
        if most:
            y = _TOP + 18 * len(rows)
            rows.append(
                f'<rect x="{_LEFT + _WIDTH + 16}" y="{y}" width="12" height="12" fill="{COLOURS[label]}"/>'
                f'<text x="{_LEFT + _WIDTH + 34}" y="{y + 11}">{label}, at most {size_text(most)}</text>'
            )
    return rows
