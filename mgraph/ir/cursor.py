"""A reading position in one line of IR text: tokens, names, attribute values and types, errors with a caret."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable
from typing import NoReturn, TypeVar

from mgraph.errors import GraphError, did_you_mean
from mgraph.ir.dims import Dim, parse_dim, product
from mgraph.ir.graph import AttrValue, Static
from mgraph.ir.printer import BARE
from mgraph.ir.types import DType, Partial, PendingType, Physical, Placement, Shard, TensorType, Type

T = TypeVar("T")

_NAME = re.compile(BARE)
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_INTEGER = re.compile(r"-?\d+")
_NUMBER = re.compile(r"-?(?:inf|nan|\d+(?:\.\d+)?(?:e[+-]?\d+)?)(?=[,\]} ]|$)")
_TENSOR = r"\w+\[[^\]]*\](?:\{[^}]*\})?(?:<pad\[[^>]*>)?"
_TYPE = re.compile(f"pending<{_TENSOR}>|{_TENSOR}")
_WORDS: dict[str, AttrValue] = {"true": True, "false": False, "none": None, **{d.text: d for d in DType}}
_IN_WORD = re.compile(r"\w").match
_SHOWN = 100
_FEW = 15

RESERVED = frozenset(_WORDS) | {"inf", "nan"}
"""Words that an attribute value reads as something else: no dim may have such a name."""


def suggestion(name: str, known: Iterable[str]) -> str | None:
    """A hint for an unknown name: the nearest of the known ones, or all of them where they are few, or nothing."""
    names = list(known)
    few = 0 < len(names) <= _FEW
    return did_you_mean(name, names) if few or difflib.get_close_matches(name, names, n=1) else None


class Cursor:
    """Reads one line from left to right. `types` is a memo of type texts, shared by all lines of a module."""

    def __init__(self, text: str, line: int, source: str, types: dict[str, Type]) -> None:
        self.text = text
        self.line = line
        self.source = source
        self.types = types
        self.position = 0

    def error(self, message: str, at: int | None = None, hint: str | None = None) -> GraphError:
        """The error at a column (default: here), with the line and a caret under the column."""
        column = self.position if at is None else at
        start = max(0, min(column - _SHOWN // 2, len(self.text) - _SHOWN))
        shown = self.text[start : start + _SHOWN]
        caret = " " * (column - start) + "^"
        where = f"{self.source}, line {self.line}, column {column + 1}\n    {shown}\n    {caret}"
        return GraphError(message, where, hint)

    def fail(self, message: str, at: int | None = None, hint: str | None = None) -> NoReturn:
        """Raise `error(...)`."""
        raise self.error(message, at, hint)

    def unknown(self, what: str, name: str, known: Iterable[str], at: int) -> NoReturn:
        """Fail on a name that is not among the known ones; the hint gives the nearest."""
        self.fail(f"unknown {what} {name!r}", at, suggestion(name, known))

    def skip(self) -> int:
        """Step over blanks; gives the position after them."""
        while self.text.startswith(" ", self.position):
            self.position += 1
        return self.position

    def at_end(self) -> bool:
        """Whether nothing but blanks is left."""
        return self.skip() == len(self.text)

    def accept(self, token: str) -> bool:
        """Step over `token` if it comes next; a word must end where the token ends."""
        end = self.skip() + len(token)
        if not self.text.startswith(token, self.position):
            return False
        if token[-1].isalnum() and _IN_WORD(self.text, end):
            return False
        self.position = end
        return True

    def expect(self, token: str) -> None:
        """Step over `token` or fail."""
        if not self.accept(token):
            found = self.text[self.position : self.position + 12].split(" ")[0] or "the end of the line"
            self.fail(f"expected {token!r}, found {found!r}" if self.text[self.position :] else f"expected {token!r}")

    def finish(self) -> None:
        """Fail unless the line is used up."""
        if not self.at_end():
            self.fail("the line should end here")

    def match(self, pattern: re.Pattern[str], what: str) -> str:
        """Step over a match of `pattern` or fail, saying that `what` is expected."""
        found = pattern.match(self.text, self.skip())
        if found is None:
            self.fail(f"expected {what}")
        self.position = found.end()
        return found.group()

    def string(self) -> str:
        """A JSON string."""
        at = self.skip()
        text = self.match(_STRING, 'a string in "double quotes"')
        try:
            return str(json.loads(text))
        except json.JSONDecodeError as error:
            self.fail(f"not a string: {error.msg}", at)

    def name(self, what: str = "a name") -> str:
        """A plain word, or a JSON string."""
        self.skip()
        return self.string() if self.text.startswith('"', self.position) else self.match(_NAME, what)

    def integer(self, what: str = "an integer") -> int:
        """A whole number."""
        return int(self.match(_INTEGER, what))

    def items(self, close: str, item: Callable[[], T]) -> list[T]:
        """Comma-separated items up to and with the closing token; the opening one has been read."""
        found: list[T] = []
        if self.accept(close):
            return found
        while True:
            found.append(item())
            if self.accept(close):
                return found
            if not self.accept(","):
                self.fail(f"expected ',' or {close!r}")

    def attr(self) -> AttrValue:
        """An attribute value."""
        at = self.skip()
        if self.text.startswith('"', at):
            return self.string()
        if self.accept("["):
            return tuple(self.items("]", self.attr))
        if self.accept("$"):
            return Static(self.name("the name of a static"))
        number = _NUMBER.match(self.text, at)
        if number is not None:
            self.position = number.end()
            return int(number.group()) if number.group().lstrip("-").isdigit() else float(number.group())
        text = self._expression(",]}")
        return _WORDS[text] if text in _WORDS else self._dim(text, at)

    def dim(self) -> Dim:
        """A dim expression, up to a comma, a closing bracket or the end of the line."""
        at = self.skip()
        return self._dim(self._expression(",]}"), at)

    def word_dim(self) -> Dim:
        """A dim expression without blanks."""
        at = self.skip()
        return self._dim(self._expression(" )"), at)

    def type(self) -> Type:
        """The type of a value."""
        at = self.skip()
        found = _TYPE.match(self.text, at)
        known = self.types.get(found.group()) if found else None
        if found is not None and known is not None:
            self.position = found.end()
            return known
        if self.accept("pending<"):
            made: Type = PendingType(self._tensor())
            self.expect(">")
        else:
            made = self._tensor()
        self.types[self.text[at : self.position]] = made
        return made

    def _expression(self, stops: str) -> str:
        start = self.position
        depth = 0
        while self.position < len(self.text):
            char = self.text[self.position]
            if depth == 0 and char in stops:
                break
            depth += (char == "(") - (char == ")")
            self.position += 1
        return self.text[start : self.position].rstrip()

    def _dim(self, text: str, at: int) -> Dim:
        try:
            return parse_dim(text)
        except ValueError as error:
            self.fail(str(error), at)

    def _tensor(self) -> TensorType:
        dtype = self._dtype()
        self.expect("[")
        shape: list[Dim] = []
        factors: list[tuple[int, tuple[Dim, ...]]] = []
        for index, parts in enumerate(self.items("]", self._extent)):
            shape.append(product(parts))
            if len(parts) > 1:
                factors.append((index, parts))
        placement = (
            self.items("}", self._placement) if self.text.startswith("{", self.position) and self.accept("{") else []
        )
        physical = self._physical() if self.accept("<pad[") else None
        return TensorType(dtype, tuple(shape), tuple(placement), tuple(factors), physical)

    def _dtype(self) -> DType:
        at = self.skip()
        word = self.match(_NAME, "a type")
        try:
            return DType.parse(word)
        except KeyError:
            self.unknown("dtype", word, [d.text for d in DType], at)

    def _extent(self) -> tuple[Dim, ...]:
        """One dim of a shape, as its factors: `B`, or `(2 f)`."""
        at = self.skip()
        text = self._expression(",]")
        if not (text.startswith("(") and text.endswith(")") and " " in text):
            return (self._dim(text, at),)
        end, self.position = self.position, at + 1
        parts = []
        while not self.accept(")"):
            parts.append(self.word_dim())
        self.position = end
        return tuple(parts)

    def _placement(self) -> tuple[str, Placement]:
        axis = self.name("the name of a mesh axis")
        self.expect("=")
        if self.accept("P("):
            reduction = self.name("a reduction")
            self.expect(")")
            return axis, Partial(reduction)
        if not self.accept("S("):
            self.fail("expected a placement: S(dim), S(dim.factor), S(dim, zigzag), P(sum) or P(max)")
        dim = self.integer()
        factor = self.integer() if self.accept(".") else None
        zigzag = self.accept(",")
        if zigzag:
            self.expect("zigzag")
        self.expect(")")
        return axis, Shard(dim, factor, zigzag)

    def _physical(self) -> Physical:
        shape = tuple(self.items("]", self.dim))
        storage = self._dtype() if self.accept("as") else None
        scale: DType | None = None
        block: list[int] = []
        if self.accept("scale"):
            scale = self._dtype()
            self.expect("[")
            block = self.items("]", self.integer)
        self.expect(">")
        return Physical(shape, storage, scale, tuple(block))
