"""The text of pipelines: `canonicalize,dce,raise-norm{max_rank=4,kinds=[rms,layer]}`.

    pipeline = [spec ("," spec)*]
    spec     = name ["{" option "=" value ("," option "=" value)* "}"]
    value    = "true" | "false" | "none" | number | word | JSON string | "[" [value ("," value)*] "]"

A word is letters, digits and `_ . * : / -`, and starts with a letter, `_`, `*` or `/`. Blanks between tokens are
allowed and not printed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from mgraph.errors import PassError

OptionValue = bool | int | float | str | None | tuple["OptionValue", ...]

_TOKEN = re.compile(
    r"""\s*(?:
    (?P<mark>[{}\[\],=])
  | (?P<string>"(?:[^"\\]|\\.)*")
  | (?P<number>[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?(?![\w.]))
  | (?P<word>[A-Za-z_*/][\w.*:/-]*)
  )""",
    re.VERBOSE,
)
_WORDS: dict[str, OptionValue] = {"true": True, "false": False, "none": None}
_PLAIN_WORD = re.compile(r"[A-Za-z_*/][\w.*:/-]*")


def print_value(value: OptionValue) -> str:
    """The text of one option value."""
    if isinstance(value, tuple):
        return "[" + ",".join(map(print_value, value)) + "]"
    if value is None or isinstance(value, bool):
        return "none" if value is None else str(value).lower()
    if isinstance(value, str):
        plain = _PLAIN_WORD.fullmatch(value) and value not in _WORDS
        return value if plain else json.dumps(value, ensure_ascii=False)
    return repr(value)


def print_spec(name: str, options: Mapping[str, OptionValue]) -> str:
    """The text of one pass."""
    if not options:
        return name
    return name + "{" + ",".join(f"{key}={print_value(value)}" for key, value in options.items()) + "}"


def parse_specs(text: str) -> list[tuple[str, dict[str, OptionValue]]]:
    """Read a pipeline as (name, options) pairs. Raises PassError, with the place, where the text is wrong."""
    return _Reader(text).pipeline()


class _Reader:
    """A recursive-descent reader over the tokens of one text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[tuple[str, str, int]] = []  # kind, text, column
        self.next = 0
        position = 0
        while text[position:].strip():
            found = _TOKEN.match(text, position)
            if found is None:
                raise self._error(
                    "unexpected character", position + len(text[position:]) - len(text[position:].lstrip())
                )
            kind = found.lastgroup
            assert kind is not None
            self.tokens.append((kind, found.group(kind), found.start(kind)))
            position = found.end()

    def _error(self, what: str, column: int) -> PassError:
        return PassError(
            f"{what} in the pipeline", f"column {column + 1} of {self.text!r}", "write name{option=value,...},name,..."
        )

    def _peek(self) -> tuple[str, str, int]:
        return self.tokens[self.next] if self.next < len(self.tokens) else ("end", "the end", len(self.text))

    def _take(self, kind: str, text: str | None = None) -> str:
        found, value, column = self._peek()
        if found != kind or (text is not None and value != text):
            raise self._error(f"expected {text or kind}, found {value}", column)
        self.next += 1
        return value

    def _accept(self, mark: str) -> bool:
        if self._peek()[:2] == ("mark", mark):
            self.next += 1
            return True
        return False

    def pipeline(self) -> list[tuple[str, dict[str, OptionValue]]]:
        specs: list[tuple[str, dict[str, OptionValue]]] = []
        while self._peek()[0] != "end":
            if specs:
                self._take("mark", ",")
            specs.append((self._take("word"), self._options()))
        return specs

    def _options(self) -> dict[str, OptionValue]:
        options: dict[str, OptionValue] = {}
        if not self._accept("{"):
            return options
        while not self._accept("}"):
            if options:
                self._take("mark", ",")
            name = self._take("word")
            self._take("mark", "=")
            options[name] = self._value()
        return options

    def _value(self) -> OptionValue:
        kind, text, column = self._peek()
        self.next += 1
        if kind == "number":
            return float(text) if re.search(r"[.eE]", text) else int(text)
        if kind == "string":
            return str(json.loads(text))
        if kind == "word":
            return _WORDS.get(text, text)
        if (kind, text) == ("mark", "["):
            items: list[OptionValue] = []
            while not self._accept("]"):
                if items:
                    self._take("mark", ",")
                items.append(self._value())
            return tuple(items)
        raise self._error(f"expected a value, found {text}", column)
