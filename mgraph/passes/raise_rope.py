"""Recognise rotary position embedding: pairs of both halves or of neighbours, written in either of two ways.

    %a = aten.mul.Tensor(%x, %cos)
    %b = aten.slice.Tensor(%x) {dim = 3, end = 8}          # first half
    %c = aten.slice.Tensor(%x) {dim = 3, start = 8}        # second half
    %d = aten.neg.default(%c)                      ==>  %y = rope(%x, %cos, %sin) {style = "half", inverse = false}
    %e = aten.cat.default(%d, %b) {dim = -1}
    %f = aten.mul.Tensor(%e, %sin)
    %y = aten.add.Tensor(%a, %f)

or, with tables of half the width, `cat(first * cos - second * sin, second * cos + first * sin)`. Where `first` and
`second` are every other element and come back so (a stack and a reshape in place of `cat`), the style is
`interleaved`; where they come back as halves, x is first brought into that order. Casts around the chain are taken
along where they lead back to x's dtype. Where only a part of the head is turned, x and its halves are slices of it.
Written with complex numbers, neighbours are one number, and cos and sin the parts of another:

    %a = reshape(%x) {shape = (B, S, 2, 4, 2)}
    %b = aten.view_as_complex.default(%a)                     %a = aten.view_as_real.default(%cis)
    %c = aten.mul.Tensor(%b, %cis)                     ==>    %cos = aten.select.int(%a) {dim = 3, index = 0}
    %d = aten.view_as_real.default(%c)                        %sin = aten.select.int(%a) {dim = 3, index = 1}
    %y = reshape(%d) {shape = (B, S, 2, 8)}                   %y = rope(%x, %cos, %sin) {style = "interleaved"}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.dims import Dim, as_dim, divide
from mgraph.ir.graph import Function, Module, Node, Value
from mgraph.ir.pattern import ANY, Guard, Match, Pattern, Where, capture, either, op, optional_cast, where
from mgraph.ir.types import DType
from mgraph.passes.rewrite import RaisePass, Rule


def _half(value: Value) -> Dim | None:
    return divide(value.tensor.shape[-1], 2)


def _is_last(value: Any, node: Node) -> bool:
    """Concatenation and slices alike: the rank of the operand is that of the result."""
    return value in (-1, len(node.operands[0].tensor.shape) - 1)


_LAST: Where = where("the last dim", _is_last)
_NEW_LAST: Where = where("a new last dim", lambda value, node: value in (-1, len(node.operands[0].tensor.shape)))
_MIDDLE: Where = where("half of the last dim", lambda value, node: value == _half(node.operands[0]))


_Parts = tuple[Pattern, Pattern]


def _halves(x: Pattern) -> _Parts:
    """The first and the second half."""
    return op("aten.slice.Tensor", x, dim=_LAST, end=_MIDDLE), op("aten.slice.Tensor", x, dim=_LAST, start=_MIDDLE)


def _alternate(x: Pattern) -> _Parts:
    """Elements 0, 2, 4, … and 1, 3, 5, …"""
    even = op("aten.slice.Tensor", x, dim=_LAST, step=2, name="even")
    return even, op("aten.slice.Tensor", x, dim=_LAST, start=1, step=2)


def _mul(left: Pattern, right: Pattern) -> Pattern:
    return op("aten.mul.Tensor", left, right, commutative=True)


def _stacked(first: Pattern, second: Pattern, name: str) -> Pattern:
    return op("reshape", op("aten.stack.default", first, second, dim=_NEW_LAST), shape=ANY, name=name)


def _full_width(x: Pattern, cos: Pattern, sin: Pattern) -> Pattern:
    """The parts may be read by nothing else."""
    (first, second), (even, odd) = _halves(x), _alternate(x)
    turned = either(
        op("aten.cat.default", op("aten.neg.default", second), first, dim=_LAST),
        _stacked(op("aten.neg.default", odd), even, "stacked"),
    )
    return op("aten.add.Tensor", _mul(x, cos), _mul(turned, sin), commutative=True)


def _half_width(parts: _Parts, cos: Pattern, sin: Pattern) -> _Parts:
    """The parts may be read twice each: they are values of the chain, not results of it."""
    first, second = parts
    return (
        op("aten.sub.Tensor", _mul(first, cos), _mul(second, sin)),
        op("aten.add.Tensor", _mul(second, cos), _mul(first, sin), commutative=True),
    )


def _part_of_wider(cos: Pattern, sin: Pattern) -> Pattern:
    """Where only a part of the last dim is turned: x and its halves are three slices of the whole."""
    x, first, second = (
        op(
            "aten.slice.Tensor",
            capture("wide"),
            dim=_LAST,
            start=ANY,
            end=ANY,
            name=name,
            shared=name == "part",
            binds=binds,
        )
        for name, binds in (("part", "x"), ("first", ""), ("second", ""))
    )
    turned = op("aten.cat.default", op("aten.neg.default", second), first, dim=_LAST)
    return op("aten.add.Tensor", _mul(x, cos), _mul(turned, sin), commutative=True)


_X = optional_cast(capture("x"))
_TABLES = optional_cast(capture("cos")), optional_cast(capture("sin"))
_ROTATION = either(
    _full_width(_X, *_TABLES),
    _part_of_wider(*_TABLES),
    op("aten.cat.default", *_half_width(_halves(_X), *_TABLES), dim=_LAST),
    op("aten.cat.default", *_half_width(_alternate(_X), *_TABLES), dim=_LAST, name="halved"),
    _stacked(*_half_width(_alternate(_X), *_TABLES), "stacked"),
)


_PAIRS = op("reshape", _X, shape=ANY, name="pairs")
_TURNED = op(
    "aten.mul.Tensor", op("aten.view_as_complex.default", _PAIRS), capture("cis"), commutative=True, binds="turned"
)
_COMPLEX = op("reshape", op("aten.view_as_real.default", _TURNED), shape=ANY)


def _dtype(match: Match) -> str | None:
    x, y = match["x"].tensor.dtype, match.root.result.tensor.dtype
    return None if x is y else f"the result is {y!r}, expected {x!r} like x"


def _shape(match: Match) -> str | None:
    x, y, cos, sin = match["x"].tensor, match.root.result.tensor, match["cos"].tensor, match["sin"].tensor
    if y.shape != x.shape:
        return f"the result is {y}, expected the shape of {x}"
    if cos.shape != sin.shape or not cos.shape or cos.shape[-1] not in (x.shape[-1], _half(match["x"])):
        return f"the tables are {cos} and {sin}, expected equal shapes with the last dim of {x} or half of it"
    return None


def _halves_of_part(match: Match) -> str | None:
    """The slices of the whole: x, and both its halves."""
    if "part" not in match.nodes:
        return None
    (start, end), first, second = (_bounds(match.nodes[name]) for name in ("part", "first", "second"))
    half = divide(as_dim(end - start), 2)
    middle = None if half is None else as_dim(start + half)
    if (first, second) != ((start, middle), (middle, end)):
        return f"the slices are {first} and {second}, expected the halves of {(start, end)}"
    return None


def _bounds(part: Node) -> tuple[Dim, Dim]:
    attrs: Any = part.attrs
    return attrs.get("start", 0), attrs.get("end", part.operands[0].tensor.shape[-1])


def _complex_shape(match: Match) -> str | None:
    """Reshapes around the chain are often one with others: what counts is how x is seen as pairs."""
    pairs, turned, cis = match.nodes["pairs"].result.tensor, match["turned"].tensor, match["cis"].tensor
    if turned.shape != pairs.shape[:-1]:
        return f"the pairs are {pairs}, and turned {turned}, expected the same shape"
    if cis.dtype is not DType.C64 or cis.shape[-1:] != pairs.shape[-2:-1]:
        return f"the table is {cis}, expected a complex number for each pair in the last dim of {pairs}"
    return None


def _emit_complex(builder: FunctionBuilder, match: Match) -> Sequence[Value]:
    x, cis, *outer = match["x"], match["cis"], *match["turned"].tensor.shape
    shape = (*outer[:-1], 2 * outer[-1])
    if x.tensor.shape != shape:
        x = builder.one("reshape", x, shape=shape)
    parts = builder.one("aten.view_as_real.default", cis)
    tables = [
        builder.one("aten.select.int", parts, dim=len(cis.tensor.shape), index=i, name=name)
        for i, name in enumerate(("cos", "sin"))
    ]
    y = builder.one("rope", x, *tables, style="interleaved", inverse=False)
    return [y if y.type == match.root.result.type else builder.one("reshape", y, shape=match.root.result.tensor.shape)]


def _emit(builder: FunctionBuilder, match: Match) -> Sequence[Value]:
    x = match["x"]
    if "halved" in match.nodes:
        *outer, width = x.tensor.shape
        pairs = builder.one("reshape", x, shape=(*outer, divide(width, 2), 2))
        order = (*range(len(outer)), len(outer) + 1, len(outer))
        x = builder.one("reshape", builder.one("aten.permute.default", pairs, dims=order), shape=x.tensor.shape)
    style = "interleaved" if "stacked" in match.nodes else "half"
    return builder.emit("rope", (x, match["cos"], match["sin"]), {"style": style, "inverse": False})


_RULE = Rule(
    "rope",
    either(op("cast", _ROTATION, dtype=ANY), _ROTATION),
    ("aten.neg.default", "aten.sub.Tensor"),
    _emit,
    (Guard("halves", _halves_of_part), Guard("shape", _shape), Guard("dtype", _dtype)),
)
_COMPLEX_RULE = Rule(
    "rope",
    either(op("cast", _COMPLEX, dtype=ANY), _COMPLEX),
    ("aten.view_as_complex.default",),
    _emit_complex,
    (Guard("shape", _complex_shape), Guard("dtype", _dtype)),
)


@dataclass(frozen=True)
class RaiseRope(RaisePass):
    """Raise rotary position embedding."""

    name: ClassVar[str] = "raise-rope"

    def rules(self, module: Module, function: Function) -> Sequence[Rule]:
        """The same rules everywhere."""
        return (_RULE, _COMPLEX_RULE)
