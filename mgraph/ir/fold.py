"""Folding of names that count up: `layers.0.w`, `layers.1.w`, … become `layers.{0..31}.w`.

Order is kept: a run is a block of items that repeats with one integer component of every name counting up by one.
Reading it back, neighbouring items with the same range count up together (`layers.{0..1}.a, layers.{0..1}.b` is
`layers.0.a, layers.0.b, layers.1.a, layers.1.b`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_INTEGER = re.compile(r"(?:(?<=\.)|^)(?:0|[1-9]\d*)(?=\.|$)")

Form = Callable[[int, int, int], str | None]


@dataclass(frozen=True, slots=True)
class Run:
    """Items `start .. start + period * repeats`; `texts` are the `period` forms with `{}` for the counting integer."""

    start: int
    period: int
    repeats: int
    first: int
    texts: tuple[str, ...]

    def lines(self) -> list[str]:
        """The folded texts, with the range in place of the counting integer."""
        span = f"{{{self.first}..{self.first + self.repeats - 1}}}"
        return [text.replace("{}", span) for text in self.texts]


def template(text: str, ordinal: int, number: int) -> str:
    """`text` with `{}` for its `ordinal`-th integer component, if that is `number`; else `text` as it is."""
    spans = _integers(text)
    if ordinal >= len(spans):
        return text
    start, end = spans[ordinal]
    return f"{text[:start]}{{}}{text[end:]}" if text[start:end] == str(number) else text


@lru_cache(maxsize=65536)
def _integers(text: str) -> tuple[tuple[int, int], ...]:
    """Where the integer components of a name stand."""
    return tuple(found.span() for found in _INTEGER.finditer(text))


def fold(names: Sequence[str], form: Form) -> Iterator[Run | int]:
    """Split items into runs and single items (given by index).

    `form(index, ordinal, number)` is the whole text of an item with `{}` where its `ordinal`-th integer `number` stood,
    or `None` where it has no such integer; items fold when their forms are equal.
    """
    position = {name: index for index, name in enumerate(names)}
    index = 0
    before = (0, 0)
    while index < len(names):
        run = _longest_run(index, names, position, form)
        if run is not None and (run.first, run.repeats) == before:
            # A neighbour with the same range would count up together with it: leave the first block out of the fold.
            yield from range(index, index + run.period)
            index += run.period
            before = (0, 0)
            run = Run(index, run.period, run.repeats - 1, run.first + 1, run.texts) if run.repeats > 2 else None
        if run is None:
            if index < len(names):
                yield index
            index, before = index + 1, (0, 0)
        else:
            yield run
            index, before = index + run.period * run.repeats, (run.first, run.repeats)


def _longest_run(index: int, names: Sequence[str], position: dict[str, int], form: Form) -> Run | None:
    best: Run | None = None
    for ordinal, (start, end) in enumerate(_integers(names[index])):
        number = int(names[index][start:end])
        follower = f"{names[index][:start]}{number + 1}{names[index][end:]}"
        period = position.get(follower, index) - index
        if period <= 0:
            continue
        repeats = 1 + _matching(index, period, ordinal, number, len(names), form) // period
        if repeats > 1 and (best is None or period * repeats > best.period * best.repeats):
            texts = tuple(form(q, ordinal, number) or "" for q in range(index, index + period))
            best = Run(index, period, repeats, number, texts)
    return best


def _matching(index: int, period: int, ordinal: int, number: int, count: int, form: Form) -> int:
    """How many items from `index` on have the same form as the item one period later."""
    forms = [form(q, ordinal, number) for q in range(index, index + period)]
    if None in forms:
        return 0
    matched = 0
    while index + period + matched < count:
        following = form(index + period + matched, ordinal, number + 1 + matched // period)
        if following != forms[matched % period]:
            break
        matched += 1
    return matched
