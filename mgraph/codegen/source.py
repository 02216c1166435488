"""Writing Python text: an indentation writer that breaks long lines the way a formatter would.

A line is given as one logical line; if it is wider than `WIDTH`, a bracket pair is opened, the last one that what
stands before leaves room for: first with the whole content on one indented line, and if that is too long, one element
per line with a trailing comma.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

WIDTH = 120
_OPEN, _CLOSE = "([{", ")]}"


class SourceWriter:
    """Collects lines of Python at the current indentation; `marks` has what some of them, counted from 0, were marked
    with."""

    def __init__(self, depth: int = 0) -> None:
        self._lines: list[str] = []
        self._depth = depth
        self.marks: dict[int, tuple[str, str]] = {}

    def line(self, text: str, mark: tuple[str, str] | None = None) -> None:
        """Append one logical line, broken where it is too long."""
        if mark is not None:
            self.marks[len(self._lines)] = mark
        self._lines.extend(broken(text, "    " * self._depth))

    def blank(self, count: int = 1) -> None:
        """Append empty lines."""
        self._lines.extend([""] * count)

    @contextmanager
    def indented(self) -> Iterator[None]:
        """Lines within stand one level deeper."""
        self._depth += 1
        yield
        self._depth -= 1

    def paste(self, other: SourceWriter) -> None:
        """Append the lines of another writer as they are."""
        self.marks |= {len(self._lines) + line: mark for line, mark in other.marks.items()}
        self._lines.extend(other._lines)

    def text(self) -> str:
        """Everything written, ending in one newline."""
        return "\n".join(self._lines) + "\n"


def broken(text: str, indent: str) -> list[str]:
    """The lines of one logical line at an indentation."""
    if len(indent) + len(text) <= WIDTH:
        return [indent + text if text else ""]
    pairs = brackets(text)
    if not pairs:
        return [indent + text]
    start, end = next((pair for pair in reversed(pairs) if len(indent) + pair[0] < WIDTH), pairs[-1])
    head, body, tail = text[: start + 1], text[start + 1 : end], text[end:]
    parts = split_commas(body)
    inner = indent + "    "
    is_literal = head[:-1] == "" or not (head[-2].isalnum() or head[-2] in "_)]")
    lines = [indent + head]
    has_comma = len(parts) > 1 or body.rstrip().endswith(",")
    if (not is_literal or not has_comma) and len(inner) + len(body) <= WIDTH:
        lines.append(inner + body)
    else:
        for part in parts:
            element = part if _is_generator(part) and len(parts) == 1 else part + ","
            lines.extend(broken(element, inner))
    if len(indent) + len(tail) <= WIDTH:
        return [*lines, indent + tail]
    first, *rest = broken(tail[1:], indent)
    return [*lines, indent + tail[0] + first.removeprefix(indent), *rest]


def brackets(text: str) -> list[tuple[int, int]]:
    """Positions of the outermost bracket pairs with content."""
    depth, start, found = 0, 0, list[tuple[int, int]]()
    for position, char in _code(text):
        if char in _OPEN:
            start = position if depth == 0 else start
            depth += 1
        elif char in _CLOSE:
            depth -= 1
            if depth == 0 and position > start + 1:
                found.append((start, position))
    return found


def split_commas(text: str) -> list[str]:
    """The comma-separated parts of a bracket's content."""
    parts, depth, start = [], 0, 0
    for position, char in _code(text):
        if char in _OPEN:
            depth += 1
        elif char in _CLOSE:
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
    rest = text[start:].strip()
    return [*parts, rest] if rest else parts


def _code(text: str) -> Iterator[tuple[int, str]]:
    """Characters outside string literals, with their positions."""
    quote = ""
    for position, char in enumerate(text):
        if quote:
            quote = "" if char == quote and text[position - 1] != "\\" else quote
        elif char in "\"'":
            quote = char
        else:
            yield position, char


def _is_generator(text: str) -> bool:
    return " for " in text
