"""Text to token ids and back: bytes by default, or the files of a published tokenizer.

With bytes the id of a token is the byte, 256 in all, and nothing needs to be trained or shipped. A tokenizer.json, as
published with most models, is read by the `tokenizers` library. A directory with a tokenizer.json may hold a
tokenizer_config.json besides, which names the special tokens, and a chat template (`chat_template.jinja`, or the key
`chat_template` of that configuration). Directories with older files instead (tokenizer.model, vocab.txt, vocab.json and
merges.txt) are read by `transformers`, where that can.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mgraph.errors import DataError
from mgraph.runtime.longest_token import longest_token
from mgraph.runtime.token_bytes import token_bytes

TOKENIZER, CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
"""The files of a directory that is given as a tokenizer; only the first must be there."""

MORE = ("merges.txt", "special_tokens_map.json", "added_tokens.json")
"""Files that belong to one of these."""

OLDER = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt", "tekken.json")
"""Files of vocabularies that a directory may have in place of the first."""

SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The roles that a configuration gives to special tokens."""


class Encoding(NamedTuple):
    """The tokens of a text, and the characters `starts[i]:ends[i]` of it that token i stands for."""

    ids: NDArray[Any]
    starts: NDArray[Any]
    ends: NDArray[Any]


class Tokenizer(Protocol):
    """What the runtime asks of a tokenizer."""

    name: str
    vocab_size: int
    """Its ids are below it."""
    special_tokens: Mapping[str, str]
    """Role (`eos_token`) to text."""
    chat_template: str | None
    prefix: tuple[int, ...]
    """Ids that a text begins with, such as that of `bos_token`, where the tokenizer puts them there."""

    @property
    def longest_token(self) -> int | None:
        """How many characters of a text a token stands for at most; None where there is no bound."""
        ...

    def encode(self, text: str) -> Tensor:
        """Token ids of a text, without any special tokens around it: a 1-d integer tensor."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[Encoding]:
        """The same for many texts, with their places in the text."""
        ...

    def decode(self, ids: list[int], special: bool = False) -> str:
        """The text of token ids; bytes that are no UTF-8 become replacement signs. `special`: write special tokens."""
        ...

    def token_id(self, token: str) -> int | None:
        """The id of one token, if it is one."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to the UTF-8 of a text, also where that is part of a character."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as tokens. There are no special ones: a chat template's markers are text like any other."""

    name = "bytes"
    vocab_size = 256
    special_tokens: Mapping[str, str] = {}
    chat_template: str | None = None
    prefix: tuple[int, ...] = ()
    longest_token: int | None = 1

    def encode(self, text: str) -> Tensor:
        """u8[number of bytes]."""
        return torch.from_numpy(_bytes(text).copy())

    def encode_batch(self, texts: Sequence[str]) -> list[Encoding]:
        """All bytes of a character stand for that character."""
        return [_byte_encoding(text) for text in texts]

    def decode(self, ids: list[int], special: bool = False) -> str:
        """Ids must be below 256."""
        return bytes(ids).decode("utf-8", errors="replace")

    def token_id(self, token: str) -> int | None:
        """The byte, for a text of one."""
        raw = token.encode()
        return raw[0] if len(raw) == 1 else None

    def token_bytes(self, token: int) -> bytes:
        """Itself."""
        return bytes([token])


class FileTokenizer:
    """A tokenizer.json, alone or with the other files of its directory."""

    def __init__(self, path: Path) -> None:
        self._library = _library(path)
        # The file may say so for another use; here, lengths are decided by what is made of the tokens.
        self._library.no_truncation()
        self._library.no_padding()
        self.name = path.resolve().name
        # Some vocabularies have gaps, so that the greatest id is beyond their number of entries.
        self.vocab_size: int = 1 + max(self._library.get_vocab(with_added_tokens=True).values(), default=-1)
        config = _read_config(path / CONFIG) if path.is_dir() else {}
        self.special_tokens: Mapping[str, str] = _special_tokens(config, path / CONFIG)
        self.chat_template = _chat_template(path, config)
        self.prefix = self._prefix(config)
        self._bytes: dict[int, bytes] = {}  # of tokens that were asked for: for alternatives often

    @cached_property
    def longest_token(self) -> int | None:
        """Of the vocabulary's."""
        return longest_token(self._library)

    def encode(self, text: str) -> Tensor:
        """i32[number of tokens]."""
        # For one text the library keeps Python's lock, for several it does not: other threads go on meanwhile.
        with self._panics():
            (encoded,) = self._library.encode_batch_fast([text], add_special_tokens=False)
        return torch.tensor(encoded.ids, dtype=torch.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[Encoding]:
        """The library works on the texts in parallel."""
        with self._panics():
            encoded = self._library.encode_batch(list(texts), add_special_tokens=False)
        return [_file_encoding(item) for item in encoded]

    def decode(self, ids: list[int], special: bool = False) -> str:
        """Special tokens are left out, unless they are asked for."""
        with self._panics():
            decoded: str = self._library.decode(ids, skip_special_tokens=not special)
        return decoded

    def token_id(self, token: str) -> int | None:
        """The id of any entry of the vocabulary."""
        found: int | None = self._library.token_to_id(token)
        return found

    def token_bytes(self, token: int) -> bytes:
        """Of a special token those of its name."""
        if token not in self._bytes:
            with self._panics():
                self._bytes[token] = token_bytes(self._library, token)
        return self._bytes[token]

    @contextmanager
    def _panics(self) -> Iterator[None]:
        """A panic of the library, which is no Exception, becomes a DataError."""
        try:
            yield
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            hint = "its tokenizer.json asks for what the tokenizers library cannot do"
            raise DataError(f"the tokenizer '{self.name}' has failed: {error}", hint=hint) from error

    def _prefix(self, config: Mapping[str, Any]) -> tuple[int, ...]:
        """`add_bos_token` of the configuration decides; where it is absent, the tokenizer's own post-processor."""
        if "add_bos_token" in config:
            bos = self.special_tokens.get("bos_token")
            found = self.token_id(bos) if config["add_bos_token"] and bos is not None else None
            return () if found is None else (found,)
        sample = self._library.encode("a", add_special_tokens=True)
        inside = sample.special_tokens_mask.index(0) if 0 in sample.special_tokens_mask else 0
        return tuple(sample.ids[:inside])


def holds_tokenizer(path: Path) -> bool:
    """Whether a directory has a tokenizer, or part of one; that then is read, or told why it cannot be."""
    return any((path / name).is_file() for name in (TOKENIZER, CONFIG, *OLDER))


def tokenizer_files(path: Path | None, template: Path | None = None) -> dict[str, Path]:
    """The files of a tokenizer (None: bytes, which have none), by the names that they have in a directory; a chat
    `template` takes the place of its own."""
    names = (TOKENIZER, CONFIG, TEMPLATE, *OLDER, *MORE)
    found = {} if path is None else {name: path / name for name in names} if path.is_dir() else {TOKENIZER: path}
    found = {name: file for name, file in found.items() if file.is_file()}
    return found if template is None else {**found, TEMPLATE: template}


def load_tokenizer(path: Path | None, model_vocab_size: int) -> Tokenizer:
    """The tokenizer at `path` (None: bytes); raises `DataError` if its ids exceed the model's vocabulary."""
    tokenizer: Tokenizer = ByteTokenizer() if path is None else FileTokenizer(path)
    if tokenizer.vocab_size > model_vocab_size:
        whose = "texts are bytes, which are" if path is None else f"the tokenizer '{tokenizer.name}' has"
        raise DataError(
            f"{whose} {tokenizer.vocab_size} tokens, the model knows {model_vocab_size}",
            hint=f"compile the model with a larger vocabulary, or give a {'smaller ' * (path is not None)}--tokenizer",
        )
    return tokenizer


def _library(path: Path) -> Any:
    """The tokenizer of the `tokenizers` library that a file or directory is."""
    from tokenizers import Tokenizer as Library  # slow to import, and needed only here

    file = path / TOKENIZER if path.is_dir() else path
    if not file.is_file():
        if path.is_dir() and holds_tokenizer(path):
            return _converted(path)
        raise DataError(
            f"--tokenizer {path}: no such file" if file == path else f"--tokenizer {path} holds no {TOKENIZER}",
            hint=f"give the path of a {TOKENIZER}, or of a directory with one",
        )
    try:
        return Library.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise DataError(
            f"--tokenizer {file} cannot be read: {error}",
            hint=f"give a {TOKENIZER} as the tokenizers library writes it",
        ) from error


def _converted(path: Path) -> Any:
    """What `transformers` makes of a directory that has older files."""
    found = [name for name in OLDER if (path / name).is_file()]
    if not found:
        raise DataError(
            f"--tokenizer {path} holds a {CONFIG}, but no {TOKENIZER} and no other vocabulary",
            hint=f"put the {TOKENIZER} of the model beside it, or give --tokenizer FILE",
        )
    trouble = "it gives nothing but special tokens"
    try:
        from transformers import AutoTokenizer

        made: Any = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        library: Any = made.backend_tokenizer
        if library.get_vocab_size() > len(library.get_added_tokens_decoder()):
            return library
    except ImportError as error:
        trouble = f"that takes transformers: {error}"
    except Exception as error:  # libraries below it raise anything
        trouble = f"transformers: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    raise DataError(
        f"--tokenizer {path} holds no {TOKENIZER}, and {found[0]} cannot be read: {trouble}",
        hint=f"write one where sentencepiece and tiktoken are installed: in transformers, "
        f"AutoTokenizer.from_pretrained({str(path)!r}).save_pretrained({str(path)!r})",
    )


def _bytes(text: str) -> NDArray[np.uint8]:
    return np.frombuffer(text.encode(), dtype=np.uint8)


def _byte_encoding(text: str) -> Encoding:
    raw = _bytes(text)
    # Every byte begins a character but those of the form 10xxxxxx.
    starts = np.cumsum((raw & 0xC0) != 0x80) - 1
    return Encoding(raw, starts, starts + 1)


def _file_encoding(encoded: Any) -> Encoding:
    offsets = np.array(encoded.offsets, dtype=np.int64).reshape(-1, 2)
    return Encoding(np.array(encoded.ids, dtype=np.int32), offsets[:, 0], offsets[:, 1])


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"--tokenizer: {path} cannot be read: {error}", hint="repair it, or remove it") from error
    if not isinstance(config, dict):
        raise DataError(f"--tokenizer: {path} is no JSON object", hint="repair it, or remove it")
    return config


def _special_tokens(config: Mapping[str, Any], file: Path) -> dict[str, str]:
    """A token is written as its text, or as an object with its `content`; null is none. Raises DataError for others."""
    written = {role: config.get(role) for role in SPECIAL}
    texts = {role: token.get("content") if isinstance(token, dict) else token for role, token in written.items()}
    for role, text in texts.items():
        if written[role] is not None and not isinstance(text, str):
            message = f"--tokenizer: {file}: {role} is {json.dumps(written[role])[:80]}: must be text"
            raise DataError(message, hint="repair it, or remove it")
    return {role: text for role, text in texts.items() if text is not None}


def _chat_template(path: Path, config: Mapping[str, Any]) -> str | None:
    """The file wins over the configuration, which may hold several templates by name, one of them the default."""
    file = path / TEMPLATE
    if file.is_file():
        return _read_template(file)
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _read_template(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise DataError(f"the chat template {file} cannot be read: {error}", hint="give UTF-8 text") from error
