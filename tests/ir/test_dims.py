"""Dims: normal form, text that parses back, exact division, substitution."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from mgraph.ir.dims import Dim, NamedDim, as_dim, dim_text, divide, names_in, parse_dim, product, substitute, symbol

B, S = symbol("B"), symbol("S")


def both(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    pairs = st.tuples(inner, inner)
    return pairs.map(lambda p: p[0] + p[1]) | pairs.map(lambda p: p[0] * p[1])


polynomials = st.recursive(st.integers(0, 7) | st.sampled_from([B, S]), both, max_leaves=5).map(as_dim)


@settings(deadline=None)
@given(polynomials, polynomials)
def test_equal_dims_have_one_form(a: Dim, b: Dim) -> None:
    assert as_dim((a + b) * (a + b)) == as_dim(a * a + 2 * a * b + b * b)
    assert parse_dim(dim_text(a)) == a and " " not in dim_text(a)


@settings(deadline=None)
@given(polynomials, st.integers(1, 9), st.integers(1, 9))
def test_substitute_evaluates(dim: Dim, b: int, s: int) -> None:
    value = substitute(dim, {"B": b, "S": s})
    assert type(value) is int
    assert value == eval(dim_text(dim), {"B": b, "S": s})


@settings(deadline=None)
@given(polynomials, polynomials)
def test_divide_undoes_multiplication(a: Dim, b: Dim) -> None:
    if b == 0:
        assert divide(a, b) is None
        return
    assert divide(as_dim(a * b), b) == a


def test_divide_is_exact_or_nothing() -> None:
    assert divide(12, 4) == 3 and divide(12, 5) is None and divide(12, 0) is None
    assert divide(4 * B * S, 2 * B) == 2 * S
    assert divide(B, 2) is None and divide(B + 1, B) is None and divide(B, S) is None and divide(4, B) is None


def test_text_of_functions_evaluates_as_written() -> None:
    cases: dict[str, Callable[[int], int]] = {
        "floor(B/3)": lambda b: b // 3,
        "B//3": lambda b: b // 3,
        "ceiling(B/3)": lambda b: math.ceil(b / 3),
        "Max(B,4)": lambda b: max(b, 4),
        "Min(B,2*B-3)": lambda b: min(b, 2 * b - 3),
        "Mod(B,3)": lambda b: b % 3,
        "B%3": lambda b: b % 3,
        "-B+B**2": lambda b: b * b - b,
        "3*(B+1)/3": lambda b: b + 1,
    }
    for text, meaning in cases.items():
        dim = parse_dim(text)
        assert parse_dim(dim_text(dim)) == dim
        for b in (1, 2, 3, 7, 64):
            assert substitute(dim, {"B": b}) == meaning(b), text


@pytest.mark.parametrize(
    "text", ["", "B +", "B[0]", "f(B)", "1.5", "True", "'B'", "B if S else 1", "1/0", "1/2", "B%0"]
)
def test_what_is_no_dim_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a "):
        parse_dim(text)


def test_whole_numbers_are_ints() -> None:
    for value in (sympy.Integer(3), B - B + 3, True + 2):
        assert type(as_dim(value)) is int and as_dim(value) == 3
    assert type(as_dim(True)) is int and dim_text(as_dim(True)) == "1"
    assert product([]) == 1 and product([2, B, S]) == 2 * B * S
    assert names_in(B * S + 1) == {"B", "S"} and names_in(7) == frozenset()
    assert substitute(B, {"B": S}) == S and substitute(B, {}) is B
    assert symbol("B") is B
    assert NamedDim("R", 0, None, B).ragged and not NamedDim("B").ragged
