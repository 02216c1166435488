"""Conversations to text by a chat template, and the parts of the text that the assistant says.

A template is Jinja text, as published with most chat models. It comes from the same place as the weights, so it runs in
a sandbox: it sees plain data, changes nothing, and calls only what is listed here.

What the assistant says is found in one of two ways. A template that marks it (`{% generation %} … {% endgeneration %}`)
is rendered once. Any other is rendered up to each assistant's turn and through it: the turn is what the second text has
more than the first, the header that asks for an answer not included. This needs every rendering to begin with the one
before; a template that writes earlier turns anew when more follow, as some do with thoughts, is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mgraph.errors import DataError

Message = Mapping[str, Any]
"""`role` and `content`, and whatever else a template reads (`tool_calls`, `reasoning_content`, …)."""

Span = tuple[int, int]
"""Characters start:end of a text."""

OPENING, CLOSING = "\ufdd0", "\ufdd1"
"""Put around marked parts while rendering: code points that Unicode keeps out of all text."""

_MARKED = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_MARKS = re.compile(f"[{OPENING}{CLOSING}]")


class Rendered(NamedTuple):
    """A conversation as text, with the spans that the assistant says, in order and apart."""

    text: str
    spans: list[Span]


class ChatTemplate:
    """A compiled template. `where` is the file or tokenizer that it is from, for errors."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], where: str) -> None:
        self.source = source
        self._marked = _MARKED.search(source) is not None
        self._special_tokens = special_tokens
        self._where = where
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise DataError(
                f"the chat template is not valid: {error.message}",
                where=f"{where}, line {error.lineno}",
                hint="--chat-template FILE with a template that Jinja can read",
            ) from error

    @property
    def reads_clock(self) -> bool:
        """Whether the text may depend on the time at which it is rendered."""
        return "strftime_now" in self.source

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> Rendered:
        """Raises `DataError` where the template refuses the conversation or hides which part is the assistant's."""
        text = self._text(messages, tools)
        if self._marked:
            return _without_marks(text)
        spans = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._text(messages[:index], tools, {"add_generation_prompt": True})
            through = text if index + 1 == len(messages) else self._text(messages[: index + 1], tools)
            if not (through.startswith(before) and text.startswith(through)):
                raise DataError(
                    f"the chat template does not tell which part of the text is turn {index + 1}, the assistant's: "
                    f"it writes {'what comes before' if text.startswith(through) else 'that turn'} in another way "
                    "when more turns follow",
                    where=self._where,
                    hint="put {% generation %} and {% endgeneration %} around what the assistant says in the template, "
                    "and give it as --chat-template FILE",
                )
            spans.append((len(before), len(through)))
        return Rendered(text, spans)

    @property
    def reserved(self) -> Collection[str]:
        """The variables that every conversation has."""
        return {"messages", "tools", "add_generation_prompt", *self._special_tokens}

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text up to where the assistant's answer begins; `variables` are others than the `reserved` ones. Raises
        `DataError` where the template refuses the conversation."""
        return self._text(messages, tools, {**(variables or {}), "add_generation_prompt": True})

    def _text(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, more: Mapping[str, Any] | None = None
    ) -> str:
        values: dict[str, Any] = {
            "add_generation_prompt": False,
            "documents": None,
            **self._special_tokens,
            **(more or {}),
        }
        try:
            return self._template.render({**values, "messages": list(messages), "tools": tools})
        except Exception as error:  # a template is a foreign program, and may raise anything
            raise DataError(
                f"the chat template refuses the conversation: {error}",
                where=self._where,
                hint="mend the conversation, or give another --chat-template FILE",
            ) from error


def load_template(file: Path | None, own: str | None, special_tokens: Mapping[str, str]) -> ChatTemplate | None:
    """The template in `file`, else the tokenizer's `own`, if it has one."""
    if file is None:
        return None if own is None else ChatTemplate(own, special_tokens, "the tokenizer's chat template")
    try:
        source = file.read_bytes().decode("utf-8")
    except (OSError, ValueError) as error:
        raise DataError(f"--chat-template {file} cannot be read: {error}", hint="give a file of UTF-8 text") from error
    return ChatTemplate(source, special_tokens, str(file))


class _Generation(Extension):
    """The block that marks what the assistant says."""

    tags = {"generation"}  # noqa: RUF012  # as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    @staticmethod
    def _mark(caller: Macro) -> str:
        return f"{OPENING}{caller()}{CLOSING}"


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **settings: Any) -> str:
    """Jinja's own filter escapes signs of HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **settings)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _without_marks(text: str) -> Rendered:
    pieces, spans, opened, length, last = [], [], 0, 0, 0
    for match in _MARKS.finditer(text):
        pieces.append(text[last : match.start()])
        length += match.start() - last
        last = match.end()
        if match[0] == OPENING:
            opened = length
        else:
            spans.append((opened, length))
    return Rendered("".join([*pieces, text[last:]]), spans)
