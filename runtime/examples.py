"""Examples to learn from, one a line of JSON, as tokens of which some are targets.

A line is an object of one of three forms, told apart by their keys; other keys are for whoever keeps the data:

* `text`: all of it is targets;
* `prompt` and `completion`: the completion is;
* `messages`, a list of objects with `role` and `content`: what the assistant says is. A list of `tools` may stand
  beside them, if the template reads it.

An example becomes one text, in which spans are targets; a token is one if any character of it lies in a span. Only a
chat template decides which special tokens stand in a conversation; the other forms begin as the tokenizer begins a text
and end with the token that ends one, which is a target.

The files are read once, line by line, and tokenized in batches; what stays is two flat arrays and offsets.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from mgraph.errors import DataError
from mgraph.runtime.chat import CLOSING, OPENING, ChatTemplate, Span
from mgraph.runtime.mesh import environment
from mgraph.runtime.tokenizer import Encoding, Tokenizer

SUFFIX = ".jsonl"

FORMS: Mapping[str, tuple[str, ...]] = {
    "text": ("text",),
    "completion": ("prompt", "completion"),
    "chat": ("messages",),
}
"""The keys that a line of each form has."""

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Who may speak in a conversation."""

LONG = ("cut", "drop", "error")
"""What may become of an example that does not fit into a row."""

BATCH_CHARACTERS = 1 << 20
"""Texts are tokenized together until they have this many characters: many enough for all cores, few enough to hold."""


@dataclass(frozen=True)
class Reading:
    """How lines become tokens: the longest example is `seq_len` + 1 tokens, since the last is a target alone."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    end_of_text: int | None
    seq_len: int
    long: str


@dataclass(frozen=True)
class Examples:
    """Example i is `tokens[offsets[i]:offsets[i + 1]]`; `targets` says of each token whether it is to be learned.

    The first token of an example is none: nothing comes before it. Every example has a target.
    """

    tokens: NDArray[Any]
    targets: NDArray[np.bool_]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_targets(self) -> int:
        """Over all examples."""
        return int(self.targets.sum())

    @property
    def positions(self) -> NDArray[np.int64]:
        """i64[examples]: the places that each takes in a row, all its tokens but the last."""
        return np.diff(self.offsets) - 1


@dataclass
class Census:
    """What the lines held: conversations, examples that were changed or left out, and the bytes of the targets."""

    lines: int = 0
    chats: int = 0
    cut: int = 0
    dropped: int = 0
    without_targets: int = 0
    byte_counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(256, np.int64))
    fingerprint: str = ""


def read_examples(files: Sequence[Path], reading: Reading) -> tuple[Examples, Census]:
    """Read, check and tokenize all lines of `files`. Raises `DataError` with the file and line of what is wrong."""
    census, gathered = Census(), _Gathered()
    drafts: list[_Draft] = []
    characters = 0
    for draft in _drafts(files, reading, census):
        drafts.append(draft)
        characters += len(draft.text)
        if characters >= BATCH_CHARACTERS:
            _tokenize(drafts, reading, census, gathered)
            drafts, characters = [], 0
    _tokenize(drafts, reading, census, gathered)
    return gathered.examples(), census


class _Draft(NamedTuple):
    """An example before tokenization; `plain` ones get the special tokens that a text has."""

    text: str
    spans: list[Span]
    plain: bool
    where: str


class _Gathered:
    """Examples one behind the other, in buffers that grow in place: there may be millions, in gigabytes."""

    def __init__(self) -> None:
        self._tokens, self._targets = bytearray(), bytearray()
        self._lengths = array("q", [0])
        self._dtype: np.dtype[Any] = np.dtype(np.int32)

    def add(self, tokens: NDArray[Any], targets: NDArray[np.bool_]) -> None:
        self._tokens += tokens.tobytes()
        self._targets += targets.tobytes()
        self._lengths.append(len(tokens))
        self._dtype = tokens.dtype

    def examples(self) -> Examples:
        """The buffers themselves, as arrays."""
        offsets = np.cumsum(np.frombuffer(self._lengths, np.int64))
        return Examples(np.frombuffer(self._tokens, self._dtype), np.frombuffer(self._targets, np.bool_), offsets)


def _drafts(files: Sequence[Path], reading: Reading, census: Census) -> Iterator[_Draft]:
    digest = hashlib.sha256()
    console = Console(stderr=True)
    with Progress(
        TextColumn("reading {task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal or environment()[0] != 0,
    ) as progress:
        task = progress.add_task("", total=sum(file.stat().st_size for file in files))
        for file in files:
            progress.update(task, description=file.name)
            for number, line in enumerate(_lines(file), start=1):
                digest.update(line)
                progress.advance(task, len(line))
                if line.strip():
                    draft = _draft(line, f"{file}:{number}", reading.template)
                    census.lines += 1
                    census.chats += not draft.plain
                    yield draft
    census.fingerprint = digest.hexdigest()


def _lines(file: Path) -> Iterator[bytes]:
    try:
        with file.open("rb") as opened:
            yield from opened
    except OSError as error:
        raise DataError(f"--data: {file} cannot be read: {error.strerror}", hint="check its permissions") from error


def _draft(line: bytes, where: str, template: ChatTemplate | None) -> _Draft:
    record = _record(line, where)
    forms = [form for form, keys in FORMS.items() if all(key in record for key in keys)]
    if len(forms) != 1:
        keys = ", ".join(map(repr, record)) or "none"
        what = f"the example has the keys of {len(forms)} forms" if forms else "the example is of no known form"
        raise DataError(
            f"{what}: its keys are {keys}",
            where=where,
            hint="one of: 'text'; 'prompt' and 'completion'; 'messages'",
        )
    if forms == ["chat"]:
        return _chat(record, where, template)
    text = "".join(_string(record[key], f"'{key}'", where) for key in FORMS[forms[0]])
    start = len(record["prompt"]) if forms == ["completion"] else 0
    return _Draft(text, [(start, len(text))], True, where)


def _record(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"the line is no JSON: {error}", where=where, hint="one JSON object a line, in UTF-8, without line breaks"
        ) from error
    if not isinstance(record, dict):
        raise DataError(f"the line is a JSON {type(record).__name__}", where=where, hint="one JSON object a line")
    return record


def _string(value: Any, what: str, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{what} is {type(value).__name__}, not text", where=where, hint="a JSON string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{what} has half of a surrogate pair at character {error.start}", where=where, hint="valid Unicode"
        ) from error
    return value


def _chat(record: Mapping[str, Any], where: str, template: ChatTemplate | None) -> _Draft:
    messages, tools = record["messages"], record.get("tools")
    if not isinstance(messages, list) or not messages:
        raise DataError("'messages' is not a list of turns", where=where, hint="a JSON list of objects, not empty")
    if tools is not None and not isinstance(tools, list):
        raise DataError(f"'tools' is {type(tools).__name__}, not a list", where=where, hint="a JSON list")
    turns = [_turn(message, f"turn {number}", where) for number, message in enumerate(messages, start=1)]
    if not any(turn["role"] == "assistant" for turn in turns):
        raise DataError("the conversation has no turn of the assistant", where=where, hint="there is nothing to learn")
    if template is None:
        raise DataError(
            "the example is a conversation, and there is no chat template",
            where=where,
            hint="--chat-template FILE, or a --tokenizer directory that has one",
        )
    try:
        rendered = template.render(turns, tools)
    except DataError as error:
        place = f"{where}, by {error.where}"
        raise DataError(error.message, where=place, hint=error.hint) from error
    return _Draft(rendered.text, rendered.spans, False, where)


def _turn(message: Any, what: str, where: str) -> dict[str, Any]:
    """A message without keys that are null. Turns that call tools, and they alone, may have no content."""
    if not isinstance(message, dict):
        raise DataError(f"{what} is {type(message).__name__}, not an object", where=where, hint="role and content")
    turn = {key: value for key, value in message.items() if value is not None}
    role = turn.get("role")
    if role not in ROLES:
        problem = f"{what} has the unknown role {role!r}" if "role" in message else f"{what} has no 'role'"
        raise DataError(problem, where=where, hint=f"one of {', '.join(ROLES)}")
    calls = role == "assistant" and bool(turn.get("tool_calls"))
    if "content" not in turn and not calls:
        raise DataError(f"{what} has no 'content'", where=where, hint="a JSON string")
    content = _string(turn.get("content", ""), f"the content of {what}", where)
    if role == "assistant" and not content and not calls:
        raise DataError(f"{what} is the assistant's and empty", where=where, hint="take it out, or say something")
    if OPENING in content or CLOSING in content:
        raise DataError(
            f"the content of {what} has U+FDD0 or U+FDD1, which are no characters", where=where, hint="take it out"
        )
    return turn


def _tokenize(drafts: list[_Draft], reading: Reading, census: Census, gathered: _Gathered) -> None:
    if not drafts:
        return
    encodings = reading.tokenizer.encode_batch([draft.text for draft in drafts])
    learned = "".join(draft.text[start:end] for draft in drafts for start, end in draft.spans)
    census.byte_counts += np.bincount(np.frombuffer(learned.encode(), np.uint8), minlength=256)
    for draft, encoding in zip(drafts, encodings, strict=True):
        _keep(draft, encoding, reading, census, gathered)


def _keep(draft: _Draft, encoding: Encoding, reading: Reading, census: Census, gathered: _Gathered) -> None:
    tokens, targets = encoding.ids, np.zeros(len(encoding.ids), np.bool_)
    for start, end in draft.spans:
        targets |= (encoding.starts < end) & (encoding.ends > start)
    if draft.plain:
        prefix = reading.tokenizer.prefix
        suffix = () if reading.end_of_text is None else (reading.end_of_text,)
        tokens = np.concatenate([np.array(part, tokens.dtype) for part in (prefix, tokens, suffix)])
        targets = np.concatenate([np.zeros(len(prefix), np.bool_), targets, np.ones(len(suffix), np.bool_)])
    longest = reading.seq_len + 1
    if len(tokens) > longest:
        if reading.long == "error":
            raise DataError(
                f"the example takes {len(tokens) - 1} positions, a row has {reading.seq_len}",
                where=draft.where,
                hint="a longer --seq-len, or --long cut or drop",
            )
        if reading.long == "drop":
            census.dropped += 1
            return
        census.cut += 1
        tokens, targets = tokens[:longest], targets[:longest]
    targets[:1] = False
    if not targets.any():
        census.without_targets += 1
        return
    gathered.add(tokens, targets)
