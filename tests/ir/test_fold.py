"""Folding keeps order and can always be undone."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from mgraph.ir.fold import Run, fold, template


def unfold(names: list[str]) -> tuple[list[str], int]:
    """All names that folding stands for, by the rule that neighbours with the same range count up together; and the
    number of folded lines."""

    def form(index: int, ordinal: int, number: int) -> str | None:
        made = template(names[index], ordinal, number)
        return None if made == names[index] else made

    rows: list[tuple[str, int, int]] = []
    for item in fold(names, form):
        if isinstance(item, Run):
            assert len(item.lines()) == item.period and all("{}" not in line for line in item.lines())
            rows += [(text, item.first, item.first + item.repeats) for text in item.texts]
        else:
            rows.append((names[item], -1, 0))
    result: list[str] = []
    start = 0
    while start < len(rows):
        end = start + 1
        while rows[start][1] >= 0 and end < len(rows) and rows[end][1:] == rows[start][1:]:
            end += 1
        for number in range(*rows[start][1:]):
            result += [text if number < 0 else text.replace("{}", str(number)) for text, _, _ in rows[start:end]]
        start = end
    return result, len(rows)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.from_regex(r"([ab]\.)?[0-3](\.[0-2])?(\.[ab])?", fullmatch=True), unique=True, max_size=14))
def test_any_names(names: list[str]) -> None:
    assert unfold(names)[0] == names


@settings(deadline=None)
@given(st.integers(0, 3), st.integers(1, 6), st.lists(st.sampled_from("abcd"), unique=True, max_size=4), st.booleans())
def test_regular_names_fold_well(first: int, count: int, parts: list[str], by_part: bool) -> None:
    numbers = range(first, first + count)
    names = [f"l.{i}.{p}" for i in numbers for p in parts]
    if by_part:
        names = [f"l.{i}.{p}" for p in parts for i in numbers]
    unfolded, lines = unfold(["head", *names, "tail"])
    assert unfolded == ["head", *names, "tail"]
    if count > 2:
        assert lines <= 2 + 2 * len(parts)


def test_templates() -> None:
    assert template("l.3.e.12.w", 0, 3) == "l.{}.e.12.w"
    assert template("l.3.e.12.w", 1, 12) == "l.3.e.{}.w"
    assert template("l.3.e.12.w", 1, 2) == "l.3.e.12.w"
    assert template("l.03.w3.x", 0, 3) == "l.03.w3.x"
    assert template("7", 0, 7) == "{}"
