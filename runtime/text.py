"""Text to learn from: files, or prose that every machine with Python has; one long row of tokens, in windows.

The last part of the text is for validation. Either part is cut into windows of S positions, each with the S tokens that
follow by one as labels, so that the last token of a window is the first of the next.

The built-in text is that of the Python language reference that `help()` shows (`pydoc_data.topics`), about 450 KB.
"""

from __future__ import annotations

import hashlib
import importlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mgraph import philox
from mgraph.errors import DataError
from mgraph.runtime.data import VALIDATION, Corpus, Row, shuffled, whole_rows
from mgraph.runtime.tokenizer import Tokenizer

BUILTIN = "builtin"
"""The name that stands for the text that comes with Python itself."""


def load_text(source: str, tokenizer: Tokenizer, seq_len: int) -> Corpus:
    """Read a text file, a directory of text files, or the built-in text, and split off the last part for validation."""
    text = builtin_text() if source == BUILTIN else _read(Path(source))
    if not text.strip():
        raise DataError(f"--data {source} holds no text", hint="give a file or directory with UTF-8 text")
    tokens = tokenizer.encode(text)
    raw = text.encode()
    cut = len(tokens) - round(len(tokens) * VALIDATION)
    return Corpus(
        train=windows(tokens[:cut], seq_len, "training"),
        validation=windows(tokens[cut:], seq_len, "validation"),
        tokens_per_byte=len(tokens) / len(raw),
        unigram_entropy=unigram_entropy(np.bincount(np.frombuffer(raw, np.uint8), minlength=256)),
        identity={"--data (SHA-256)": hashlib.sha256(raw).hexdigest()},
    )


@dataclass(frozen=True)
class Windows:
    """Tokens [windows, S + 1], a view."""

    tokens: Tensor

    def rows(self, key: philox.Key | None) -> WindowRows:
        """Every window is a row."""
        count = len(self.tokens)
        return WindowRows(self.tokens, np.arange(count) if key is None else shuffled(count, key))


@dataclass(frozen=True)
class WindowRows:
    """Windows in an order."""

    tokens: Tensor
    order: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> Row:
        """One row, a document of its own."""
        window = self.tokens[int(self.order[index])].to(torch.int64)
        row = {name: tensor[0] for name, tensor in whole_rows(window[None, :-1]).items()}
        return {**row, "labels": window[1:]}


def windows(tokens: Tensor, seq_len: int, split: str) -> Windows:
    """Cut 1-d tokens; `split` names them where they do not suffice for one window."""
    if len(tokens) <= seq_len:
        raise DataError(
            f"the {split} split has {len(tokens)} tokens; one window of --seq-len {seq_len} needs {seq_len + 1}",
            hint="more --data, or a shorter --seq-len",
        )
    return Windows(tokens.unfold(0, seq_len + 1, seq_len))


def unigram_entropy(byte_counts: NDArray[np.int64]) -> float:
    """Entropy of the byte frequencies, -sum p ln p, in nats per byte: the loss of a model that only counts bytes."""
    frequencies = byte_counts[byte_counts > 0] / byte_counts.sum()
    return abs(float((frequencies * np.log(frequencies)).sum()))


def builtin_text() -> str:
    """All help topics of this Python, in the order of their names. Raises DataError where Python came without them."""
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise DataError(
            "the built-in corpus is missing: this Python has no module pydoc_data.topics",
            hint="name a text file or a directory instead, or use a Python with its full standard library",
        ) from error
    return "\n".join(topics[name] for name in sorted(topics))


def files_of(path: Path) -> list[Path]:
    """The files that `--data` names, in order: one, or those of a directory that are not hidden."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"--data {path}: no such file or directory", hint=f"--data {BUILTIN} needs no file")
    inside = sorted(path.rglob("*"))
    files = [f for f in inside if f.is_file() and not any(p.startswith(".") for p in f.relative_to(path).parts)]
    if not files:
        raise DataError(f"--data {path}: the directory holds no files", hint="put UTF-8 text files in it")
    return files


def _read(path: Path) -> str:
    return "\n".join(_read_file(file) for file in files_of(path))


def _read_file(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise DataError(f"--data: {path} cannot be read: {error.strerror}", hint="check its permissions") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"--data: {path} is not UTF-8 text: byte {error.object[error.start]:#04x} at offset {error.start}",
            hint="convert it (iconv -t utf-8), or take the file out of the directory",
        ) from error
    if "\0" in text:
        raise DataError(
            f"--data: {path} is a binary file: it has a zero byte at offset {len(text[: text.index(chr(0))].encode())}",
            hint="give text, or take the file out of the directory",
        )
    return text
