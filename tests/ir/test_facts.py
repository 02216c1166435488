"""Dim facts parse and evaluate."""

from __future__ import annotations

import pytest

from mgraph.ir.facts import parse_fact


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
