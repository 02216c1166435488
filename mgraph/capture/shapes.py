"""From torch's symbolic ints to dims over the module's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.utils._sympy import functions

from mgraph.capture.adapter import InputSpec
from mgraph.ir.dims import Dim, NamedDim, as_dim, names_in, symbol
from mgraph.ir.torch_bridge import from_torch_dtype
from mgraph.ir.types import TensorType

MINIMA = {"B": 1, "S": 2}
"""The smallest extent of each named dim. A sequence of one has no next token."""

_FUNCTIONS: dict[str, Any] = {
    "FloorDiv": lambda a, b: sympy.floor(a / b),
    "CleanDiv": lambda a, b: a / b,
    "CeilDiv": lambda a, b: sympy.ceiling(a / b),
    "IntTrueDiv": lambda a, b: a / b,
    "Mod": sympy.Mod,
    "PythonMod": sympy.Mod,
    "Max": sympy.Max,
    "Min": sympy.Min,
    "PowByNatural": lambda a, b: a**b,
}


class Unnamed(Exception):
    """An extent that depends on the values of tensors: no named dim can say it."""


class ShapeReader:
    """Converts the sizes of one traced program, each distinct expression once."""

    def __init__(self, inputs: Sequence[tuple[InputSpec, torch.Tensor]], ranges: dict[Any, Any]) -> None:
        self._symbols: dict[Any, sympy.Symbol] = {}
        self._dims: dict[Any, Dim] = {}
        self._types: dict[TensorType, TensorType] = {}
        for spec, tensor in inputs:
            for dim, size in zip(spec.shape, tensor.shape, strict=True):
                if not isinstance(dim, int) and isinstance(size, torch.SymInt):
                    self._name(dim, size.node.expr)
        self._ranges = {self._symbols[s].name: r for s, r in ranges.items() if s in self._symbols}

    def _name(self, dim: sympy.Expr, expression: sympy.Expr) -> None:
        """Find which named dim a symbol of torch is, from one input dim as declared and as traced."""
        (name,) = names_in(dim)
        (traced,) = expression.free_symbols
        if as_dim(expression.xreplace({traced: symbol(name)})) == as_dim(dim):
            self._symbols[traced] = symbol(name)

    def named_dims(self) -> dict[str, NamedDim]:
        """The named dims with the ranges that torch proved."""
        return {
            name: NamedDim(name, max(int(r.lower), MINIMA[name]), _maximum(r.upper))
            for name, r in sorted(self._ranges.items())
        }

    def unproved(self, condition: torch.SymBool) -> str | None:
        """A condition on sizes over the named dims, `None` where it holds for all extents; raises `Unnamed`."""
        converted = self._convert(condition.node.expr)
        above = {symbol(n): sympy.Symbol(f"{n}_above", integer=True, nonnegative=True) + m for n, m in MINIMA.items()}
        shifted = converted.xreplace(above)
        if isinstance(shifted, sympy.Eq):
            shifted = sympy.Eq(sympy.expand(shifted.lhs - shifted.rhs), 0)
        return None if shifted == sympy.true else str(converted)

    def dim(self, size: Any) -> Dim:
        """An int or SymInt as a dim; raises `Unnamed` where it depends on data."""
        if isinstance(size, int):
            return size
        expression = size.node.expr
        found = self._dims.get(expression)
        if found is None:
            found = self._dims[expression] = as_dim(self._convert(expression))
        return found

    def _convert(self, expression: sympy.Expr) -> sympy.Expr:
        if expression.is_Symbol:
            if expression not in self._symbols:
                raise Unnamed(str(expression))
            return self._symbols[expression]
        if not expression.args:
            return expression
        arguments = [self._convert(a) for a in expression.args]
        if type(expression).__module__ == functions.__name__:
            name = type(expression).__name__
            if name not in _FUNCTIONS:
                raise Unnamed(str(expression))
            return _FUNCTIONS[name](*arguments)
        return expression.func(*arguments)

    def type_of(self, tensor: torch.Tensor) -> TensorType:
        """The type of a fake tensor, one object for equal types.

        Raises `Unnamed`, or KeyError for a dtype that the IR has not.
        """
        type_ = TensorType(from_torch_dtype(tensor.dtype), tuple(self.dim(s) for s in tensor.shape))
        return self._types.setdefault(type_, type_)


def _maximum(upper: Any) -> int | None:
    """Torch writes an unbounded size as infinity or as an int near 2**63."""
    return int(upper) if upper.is_Integer and int(upper) < 2**62 else None
