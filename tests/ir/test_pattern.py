"""Patterns: captures, alternatives, operand order, ownership, and the first failing guard."""

from __future__ import annotations

import pytest

from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.graph import Function
from mgraph.ir.pattern import ANY, Failure, Guard, Match, Matcher, Pattern, capture, either, op, optional_cast
from mgraph.ir.types import DType, TensorType

F32 = TensorType(DType.F32, (3,))


def _function(swap: bool = False, extra_reader: bool = False, cast: bool = False) -> Function:
    """`y = exp(x) * x` with the operands either way round, and perhaps another reader of `exp(x)`."""
    builder = FunctionBuilder("f", "test")
    x = builder.param("x", F32)
    exponential = builder.one("aten.exp.default", x, name="e")
    factor = builder.one("cast", exponential, dtype=DType.F64, name="c") if cast else exponential
    y = builder.one("aten.mul.Tensor", *((x, factor) if swap else (factor, x)), name="y")
    return builder.build([y, exponential] if extra_reader else [y])


def _match(function: Function, pattern: Pattern, *guards: Guard) -> Match | Failure:
    return Matcher(function).match(pattern, function.nodes[-1], guards)


EXP = op("aten.exp.default", capture("x"), name="exp")
PRODUCT = op("aten.mul.Tensor", optional_cast(EXP), capture("x"), commutative=True)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("cast", [False, True])
def test_either_order_and_an_optional_cast(swap: bool, cast: bool) -> None:
    function = _function(swap=swap, cast=cast)
    found = _match(function, PRODUCT)
    assert isinstance(found, Match)
    assert found["x"] is function.params[0]
    assert found.nodes["exp"] is function.nodes[0]
    assert found.owned == {function.nodes[0], function.nodes[-1]}, "the cast is shared"


def test_order_matters_unless_commutative() -> None:
    failure = _match(_function(swap=True), op("aten.mul.Tensor", EXP, capture("x")))
    assert isinstance(failure, Failure)
    assert (failure.guard, failure.detail) == ("op", "`mul` reads %x, expected `exp`")


def test_a_capture_is_one_value() -> None:
    failure = _match(_function(), op("aten.mul.Tensor", capture("a"), capture("a")))
    assert isinstance(failure, Failure)
    assert (failure.guard, failure.detail) == ("operand", "`mul` reads %x, expected %e (a)")


def test_a_value_that_others_read_is_not_owned() -> None:
    failure = _match(_function(extra_reader=True), PRODUCT)
    assert isinstance(failure, Failure)
    assert (failure.guard, failure.detail, failure.node.id) == ("users", "`exp` has 2 users, expected 1", "e")


def test_an_exported_value_may_be_read() -> None:
    function = _function(extra_reader=True)
    found = Matcher(function).match(PRODUCT, function.nodes[-1], (), lambda match: function.results)
    assert isinstance(found, Match)


def test_the_first_failing_guard_wins_and_alternatives_go_on() -> None:
    guards = Guard("first", lambda match: "no exp" if "exp" not in match.nodes else None), Guard("last", lambda m: "no")
    failure = _match(_function(), PRODUCT, *guards)
    assert isinstance(failure, Failure)
    assert (failure.guard, failure.detail) == ("last", "no")
    loose = op("aten.mul.Tensor", either(EXP, capture("e")), capture("x"))
    found = _match(_function(extra_reader=True), loose)
    assert isinstance(found, Match), "the second alternative does not own exp"
    assert "exp" not in found.nodes


def test_attributes_are_exact() -> None:
    function = _function(cast=True)
    for wanted, fits in ((ANY, True), (DType.F64, True), (DType.F32, False)):
        pattern = op("aten.mul.Tensor", op("cast", EXP, dtype=wanted), capture("x"))
        assert isinstance(_match(function, pattern), Match) is fits
    failure = _match(function, op("aten.mul.Tensor", op("cast", EXP), capture("x")))
    assert isinstance(failure, Failure)
    assert failure.detail == "`cast` has dtype = f64, expected none"
