"""Dim facts parse and evaluate."""

from __future__ import annotations

import pytest

from mgraph.ir.dims import evaluate, symbol
from mgraph.ir.facts import multiples, parse_fact, share


@pytest.mark.parametrize(
    ("text", "values", "holds"),
    [
        ("S % tp == 0", {"S": 12, "tp": 4}, True),
        ("S % tp == 0", {"S": 13, "tp": 4}, False),
        ("T >= 1", {"T": 1}, True),
        ("B*S < 7", {"B": 2, "S": 4}, False),
        ("B != S", {"B": 2, "S": 4}, True),
        ("B <= 2", {"B": 3}, False),
        ("floor(B/2) > 1", {"B": 4}, True),
    ],
)
def test_facts(text: str, values: dict[str, int], holds: bool) -> None:
    fact = parse_fact(text)
    assert fact.names() == set(values) and fact.holds(values) is holds


@pytest.mark.parametrize("text", ["", "S", "S = 2", "1 < S < 2", "S == ", "S == f(2)"])
def test_what_is_no_fact(text: str) -> None:
    with pytest.raises(ValueError, match="not"):
        parse_fact(text)


def test_multiples_are_read_off_the_facts() -> None:
    facts = ("S % tp == 0", "T % 3 == 0", "B % tp == 1", "B >= 2", "U % other == 0")
    assert multiples(facts, {"tp": 4, "other": None}) == {"S": 4, "T": 3}


def test_shares_of_extents() -> None:
    batch, length = symbol("B"), symbol("S")
    known = {"S": 4}
    assert share(12, 4, known) == 3
    assert share(6, 4, known) is None
    assert share(batch * length, 4, known) == batch * length / 4
    assert share(2 * length, 8, known) == length / 4
    assert share(length, 8, known) is share(batch, 4, known) is share(length, 4, {}) is None
    assert evaluate(share(3 * batch * length, 4, known) or 0, {"B": 5, "S": 8}) == 30
