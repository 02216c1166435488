"""Pipeline text: reading, printing, and errors that name the column."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgraph.errors import PassError
from mgraph.passes.spec import OptionValue, parse_specs, print_spec

VALUES: st.SearchStrategy[OptionValue] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=5,
)
NAMES = st.from_regex(r"[a-z][a-z0-9_-]{0,8}", fullmatch=True)


@given(st.lists(st.tuples(NAMES, st.dictionaries(NAMES, VALUES, max_size=3)), max_size=4))
def test_round_trip(specs: list[tuple[str, dict[str, OptionValue]]]) -> None:
    text = ",".join(print_spec(name, options) for name, options in specs)
    read = parse_specs(text)
    assert read == specs
    # `==` does not tell 1 from 1.0 and True.
    assert repr(read) == repr(specs)


def test_blanks_and_words() -> None:
    assert parse_specs(' dce , raise-norm { kinds = [rms, "la yer"], rank=-2 , eps=1e-5,on=true,off=none}') == [
        ("dce", {}),
        ("raise-norm", {"kinds": ("rms", "la yer"), "rank": -2, "eps": 1e-5, "on": True, "off": None}),
    ]
    assert parse_specs("") == []


@pytest.mark.parametrize(
    ("text", "column", "what"),
    [
        ("dce,", 5, "expected word, found the end"),
        ("dce cse", 5, "expected ,, found cse"),
        ("dce{limit}", 10, "expected =, found }"),
        ("dce{limit=}", 11, "expected a value, found }"),
        ("dce ; cse", 5, "unexpected character"),
        ("dce{a=[1,2", 11, "expected ,, found the end"),
    ],
)
def test_errors_name_the_column(text: str, column: int, what: str) -> None:
    with pytest.raises(PassError) as caught:
        parse_specs(text)
    assert caught.value.message == f"{what} in the pipeline"
    assert caught.value.where == f"column {column} of {text!r}"
