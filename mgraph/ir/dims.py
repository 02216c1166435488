"""Symbolic dimensions: Python ints, or sympy expressions over the named dims of a module.

A `Dim` is an `int` wherever the extent is known and a `sympy.Expr` over positive integer symbols otherwise. Symbols
are interned by name, so that two modules that both speak of `B` mean the same symbol and expressions compare by `==`.
"""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

import sympy

Dim: TypeAlias = "int | sympy.Expr"


class Extent(StrEnum):
    """How the extent of a ragged dim becomes known at run time (design: a dispatch says so)."""

    BOUND = "bound"  # never read back: kernels run to the bound
    BUDGET = "budget"  # a smaller buffer with an overflow flag that the step checks
    HOST = "host"  # synchronises; never captured in a CUDA graph


@dataclass(frozen=True, slots=True)
class NamedDim:
    """A named dimension of a module: `minimum <= extent <= maximum` (`None`: unbounded).

    A ragged dim has a `bound` in the other dims; its physical extent is the bound, and rows past the run-time extent
    are undefined and must never be read into a result.
    """

    name: str
    minimum: int = 1
    maximum: int | None = None
    bound: Dim | None = None
    extent: Extent | None = None

    @property
    def ragged(self) -> bool:
        """Whether the run-time extent may be anything up to `bound`."""
        return self.bound is not None


@functools.cache
def symbol(name: str) -> sympy.Symbol:
    """The interned positive integer symbol of a named dim."""
    return sympy.Symbol(name, integer=True, positive=True)


def as_dim(value: Any) -> Dim:
    """Normalise: integer expressions become `int`, everything else is expanded so that equal dims are `==`."""
    if isinstance(value, int):
        return int(value)
    expanded = _expand(value)
    return int(expanded) if expanded.is_Integer else expanded


@functools.lru_cache(maxsize=65536)
def _expand(value: sympy.Expr) -> sympy.Expr:
    return sympy.expand(value)


def product(dims: Iterable[Dim]) -> Dim:
    """The product of extents; 1 for none."""
    return as_dim(functools.reduce(operator.mul, dims, 1))


def names_in(dim: Dim) -> frozenset[str]:
    """The named dims that an expression uses."""
    return frozenset() if isinstance(dim, int) else frozenset(s.name for s in dim.free_symbols)


def factor_of(dim: Dim, name: str) -> sympy.Rational | None:
    """How often an extent has the named dim, where it is that alone."""
    if names_in(dim) != {name}:
        return None
    factor = sympy.cancel(sympy.sympify(dim) / symbol(name))
    return factor if isinstance(factor, sympy.Rational) else None


def substitute(dim: Dim, values: Mapping[str, Dim]) -> Dim:
    """Replace named dims; a full assignment gives an `int`."""
    if isinstance(dim, int) or not values:
        return dim
    return as_dim(dim.xreplace({symbol(name): sympy.sympify(value) for name, value in values.items()}).doit())


def evaluate(dim: Dim, values: Mapping[str, Any]) -> Any:
    """The extent for given named dims, which may be ints or anything with their arithmetic (torch's symbolic ints)."""
    return dim if isinstance(dim, int) else _evaluate(dim, values)


def _evaluate(expression: Any, values: Mapping[str, Any]) -> Any:
    if expression.is_Integer:
        return int(expression)
    if expression.is_Symbol:
        return values[expression.name]
    if isinstance(expression, sympy.floor | sympy.ceiling):
        above, below = (_evaluate(part, values) for part in sympy.fraction(sympy.together(expression.args[0])))
        return above // below if isinstance(expression, sympy.floor) else -(-above // below)
    if isinstance(expression, sympy.Mul) and not expression.args[0].is_Integer and expression.args[0].is_Rational:
        above, below = sympy.fraction(expression)  # a part of what is a multiple
        return _evaluate(above, values) // int(below)
    arguments = [_evaluate(part, values) for part in expression.args]
    if isinstance(expression, sympy.Add):
        return functools.reduce(operator.add, arguments)
    if isinstance(expression, sympy.Mul):
        return functools.reduce(operator.mul, arguments)
    if isinstance(expression, sympy.Pow):
        return arguments[0] ** arguments[1]
    if isinstance(expression, sympy.Mod):
        return arguments[0] % arguments[1]
    if isinstance(expression, sympy.Max | sympy.Min):
        return (max if isinstance(expression, sympy.Max) else min)(arguments)
    raise ValueError(f"cannot evaluate the dimension {expression}")


def divide(dim: Dim, by: Dim) -> Dim | None:
    """`dim / by` where it is exact for all values of the named dims, else `None`."""
    if by == 0:
        return None
    if isinstance(dim, int) and isinstance(by, int):
        return dim // by if dim % by == 0 else None
    quotient = sympy.cancel(sympy.sympify(dim) / by)
    denominator = sympy.fraction(sympy.together(quotient))[1]
    return as_dim(quotient) if denominator == 1 else None


@functools.lru_cache(maxsize=65536)
def dim_text(dim: Dim) -> str:
    """Deterministic text that `parse_dim` reads back."""
    return str(dim) if isinstance(dim, int) else str(dim).replace(" ", "")


_BINARY: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: sympy.sympify(a) / b,
    ast.FloorDiv: lambda a, b: sympy.floor(sympy.sympify(a) / b),
    ast.Mod: sympy.Mod,
    ast.Pow: operator.pow,
}
_CALLS: dict[str, Callable[..., Any]] = {
    "floor": sympy.floor,
    "ceiling": sympy.ceiling,
    "Max": sympy.Max,
    "Min": sympy.Min,
    "Mod": sympy.Mod,
}


@functools.lru_cache(maxsize=65536)
def parse_dim(text: str) -> Dim:
    """Read a dim expression: ints, names, `+ - * / // % **`, floor, ceiling, Max, Min, Mod. Raises ValueError."""
    try:
        dim = as_dim(_from_ast(ast.parse(text.strip(), mode="eval").body))
    except (SyntaxError, KeyError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"not a dimension expression: {text!r}") from error
    if not isinstance(dim, int) and dim.is_integer is False:
        raise ValueError(f"not a whole number: {text!r}")
    return dim


def _from_ast(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and not isinstance(node.value, bool):
        return node.value
    if isinstance(node, ast.Name):
        return symbol(node.id)
    if isinstance(node, ast.BinOp):
        return _BINARY[type(node.op)](_from_ast(node.left), _from_ast(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_from_ast(node.operand)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        return _CALLS[node.func.id](*map(_from_ast, node.args))
    raise TypeError(ast.dump(node))
