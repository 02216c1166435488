"""Keys tell apart what computes differently."""

from __future__ import annotations

import itertools
import math

from mgraph.ir.dims import symbol
from mgraph.ir.graph import Static
from mgraph.ir.types import DType
from mgraph.passes.keys import attr_key, attrs_key


def test_values_that_python_calls_equal_differ() -> None:
    values = [1, 1.0, True, 0, 0.0, -0.0, False, None, "1", (1,), (1.0,), DType.F32, Static("a"), symbol("S"), math.inf]
    for a, b in itertools.combinations(values, 2):
        assert attr_key(a) != attr_key(b), (a, b)
    assert attr_key(math.nan) == attr_key(float("nan"))
    assert len({attr_key(v) for v in values}) == len(values)


def test_order_of_attributes_does_not_matter() -> None:
    assert attrs_key({"a": 1, "b": (2, symbol("S"))}) == attrs_key({"b": (2, symbol("S")), "a": 1})
    assert attrs_key({"a": 1}) != attrs_key({"a": 1, "b": 2})
