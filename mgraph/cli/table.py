"""Plain tables on stdout: columns as wide as their widest cell, whatever the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The text of a table, ending in a newline; the last column is not padded."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header) - 1)]
    texts = ["  ".join([*(c.ljust(w) for c, w in zip(line, widths, strict=False)), line[-1]]) for line in lines]
    return "".join(text.rstrip() + "\n" for text in texts)
