"""Named dims in emitted code: bound once at the top of a function from the shapes of its inputs, then used by name."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import sympy

from mgraph.codegen.source import SourceWriter
from mgraph.ir.dims import Dim, factor_of, names_in, substitute, symbol
from mgraph.ir.graph import Value
from mgraph.ir.local import Division
from mgraph.ir.types import TensorType


def python_text(dim: Dim) -> str:
    """A dim as a Python expression over its names."""
    if isinstance(dim, int):
        return str(dim)
    return _text(dim, 0)


def _text(expression: sympy.Expr, strength: int) -> str:
    """`strength`: 0 where a sum may stand, 1 in a sum, 2 in a product."""
    if expression.is_Integer or expression.is_Symbol:
        return str(expression)
    if isinstance(expression, sympy.Add):
        first, *rest = expression.as_ordered_terms()
        text = _text(first, 1)
        for term in rest:
            negative = term.could_extract_minus_sign()
            text += f" - {_text(-term, 2)}" if negative else f" + {_text(term, 1)}"
        return f"({text})" if strength else text
    if isinstance(expression, sympy.Mul):
        above, below = sympy.fraction(expression)
        text = " * ".join(_text(f, 2) for f in above.as_ordered_factors())
        text = text if below == 1 else f"{text} // {_text(below, 2)}"
        return f"({text})" if strength > 1 else text
    if isinstance(expression, sympy.Pow):
        return " * ".join([_text(expression.base, 2)] * int(expression.exp))
    if isinstance(expression, sympy.floor):
        above, below = sympy.fraction(sympy.together(expression.args[0]))
        text = f"{_text(above, 2)} // {_text(below, 2)}"
        return f"({text})" if strength > 1 else text
    if isinstance(expression, sympy.ceiling):
        above, below = sympy.fraction(sympy.together(expression.args[0]))
        return f"-(-{_text(above, 2)} // {_text(below, 2)})"
    if isinstance(expression, sympy.Mod):
        return f"({_text(expression.args[0], 2)} % {_text(expression.args[1], 2)})"
    if isinstance(expression, sympy.Max | sympy.Min):
        name = "max" if isinstance(expression, sympy.Max) else "min"
        return f"{name}({', '.join(_text(a, 0) for a in expression.args)})"
    raise AssertionError(f"no Python text for the dimension {expression}")


class DimScope:
    """The dims of one function: what has been asked for, and the lines that bind it.

    `division` says which part of its inputs a rank holds (default: all of them). Dims of `made` are bound where the
    function makes the first tensor that has them.
    """

    def __init__(self, inputs: Sequence[Value], division: Division | None = None, made: Collection[str] = ()) -> None:
        self._division, self._made = division, made
        self._sources = [v for v in inputs if isinstance(v.type, TensorType)]
        self._needed: dict[str, None] = {}
        self.names = {n for v in self._sources for d in v.tensor.shape for n in names_in(d)}

    def text(self, dim: Dim) -> str:
        """The Python text of a dim; its names will be bound, those of ragged dims by what they have room for."""
        if self._division is not None:
            dim = substitute(dim, self._division.bounds)
        self._needed.update(dict.fromkeys(sorted(names_in(dim))))
        return python_text(dim)

    def bind_made(self, writer: SourceWriter, value: Value, text: str, names: Collection[str]) -> set[str]:
        """Write the lines that bind those of the names that a value tells, which is written `text`; these names."""
        shape = self._held(value)
        found = {n: i for n in names for i, d in enumerate(shape) if factor_of(d, n) is not None}
        if found:
            self._write(writer, value, text, found)
        return set(found)

    def bind(self, writer: SourceWriter, texts: dict[Value, str]) -> None:
        """Write the lines that bind every name asked for, from inputs written as `texts`."""
        todo = {name: None for name in self._needed if name not in self._made}
        for plain in (True, False):
            for value in self._sources:
                if not todo:
                    return
                shape = self._held(value)
                found = {n: i for i, d in enumerate(shape) for n in todo if _extent(d, n, plain)}
                found = {n: i for n, i in found.items() if list(found.values()).index(i) == list(found).index(n)}
                if found and value in texts:
                    self._write(writer, value, texts[value], found)
                    todo = {n: None for n in todo if n not in found}
        assert not todo, f"no input tells the extent of {', '.join(todo)}"

    def _write(self, writer: SourceWriter, value: Value, text: str, found: dict[str, int]) -> None:
        shape = self._held(value)
        if len(found) > 1 and all(shape[i] == symbol(n) for n, i in found.items()):
            by_place = {i: n for n, i in found.items()}
            writer.line(f"{', '.join(by_place.get(i, '_') for i in range(len(shape)))} = {text}.shape")
            return
        for name, i in found.items():
            factor = factor_of(shape[i], name)
            assert factor is not None, f"{text}.shape[{i}] does not tell {name}"
            times, parts = (f" {sign} {n}" if n != 1 else "" for sign, n in (("*", factor.q), ("//", factor.p)))
            writer.line(f"{name} = {text}.shape[{i}]{times}{parts}")

    def _held(self, value: Value) -> tuple[Dim, ...]:
        """The shape of what a rank holds."""
        return (value.tensor if self._division is None else self._division.local_type(value.tensor)).shape


def _extent(dim: Dim, name: str, plain: bool) -> bool:
    """Whether an extent is the named dim, or (not `plain`) a multiple or a part of it."""
    return bool(dim == symbol(name)) if plain else factor_of(dim, name) is not None
