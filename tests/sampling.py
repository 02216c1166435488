"""A seeded sample of a matrix of tests: `make test` runs the sample, `make test-full` all of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

_SEED = 20


def sampled(cases: Sequence[Any], count: int, always: Sequence[Any] = (), never: Sequence[Any] = ()) -> list[Any]:
    """All cases as parameters; those that are neither among `count` drawn ones nor in `always` are marked `full`.

    Those in `never` take too long to be drawn. The draw depends on the cases alone, so it is the same in every run and
    every process.
    """
    quick = [index for index, case in enumerate(cases) if case not in never]
    drawn = random.Random(f"{_SEED} {list(cases)!r}").sample(quick, min(count, len(quick)))
    made = []
    for index, case in enumerate(cases):
        fast = index in drawn or case in always
        values = case if isinstance(case, tuple) else (case,)
        made.append(pytest.param(*values, marks=() if fast else pytest.mark.full))
    return made
