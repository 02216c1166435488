"""From text to batches: a corpus, its split, and a stream of batches that can be resumed anywhere.

The corpus is one long row of tokens; its last part is for validation. The training part is cut into windows of S
positions, each with the S tokens that follow by one as labels. An epoch visits every window once, in an order that
depends only on the seed and the epoch, so where a run stands is two integers: epoch and windows taken.

All ranks walk the same stream. A step has a number of microbatches; microbatch m goes to the data-parallel rank
m modulo their number, and the others step over it. So N ranks with one microbatch each see exactly what one rank with N
microbatches sees, and a run may be resumed on another number of ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from mgraph import philox
from mgraph.errors import DataError
from mgraph.runtime.corpus import builtin_text
from mgraph.runtime.tokenizer import Tokenizer

BUILTIN = "builtin"
"""The name that stands for the text that comes with Python itself."""

IGNORED = -100
"""A label that no loss counts."""

INPUTS = ("tokens", "labels", "position_ids", "segment_ids")
"""What every batch has, and so what a package may take: each i64[B, S]."""

Batch = dict[str, Tensor]
"""One tensor i64[B, S] for each of `INPUTS`, on the CPU. Documents that share a row have segment_ids of their own, and
position_ids that begin at 0 in each; no label is a token of another document than its position."""


@dataclass(frozen=True)
class Corpus:
    """Tokens for training and for validation, and facts of the whole text."""

    train: Tensor
    validation: Tensor
    tokens_per_byte: float
    unigram_entropy: float
    fingerprint: str


@dataclass(frozen=True)
class Position:
    """Where a stream stands: the epoch, and the windows taken of it."""

    epoch: int = 0
    window: int = 0


def load_corpus(source: str, tokenizer: Tokenizer, validation_fraction: float = 0.1) -> Corpus:
    """Read a text file, a directory of text files, or the built-in text, and split off the last part for validation."""
    text = builtin_text() if source == BUILTIN else _read(Path(source))
    if not text.strip():
        raise DataError(f"--data {source} holds no text", hint="give a file or directory with UTF-8 text")
    tokens = tokenizer.encode(text)
    raw = text.encode()
    cut = len(tokens) - round(len(tokens) * validation_fraction)
    return Corpus(
        train=tokens[:cut],
        validation=tokens[cut:],
        tokens_per_byte=len(tokens) / len(raw),
        unigram_entropy=unigram_entropy(raw),
        fingerprint=hashlib.sha256(raw).hexdigest(),
    )


def unigram_entropy(raw: bytes) -> float:
    """Entropy of the byte frequencies, -sum p ln p, in nats per byte: the loss of a model that only counts bytes."""
    counts = torch.bincount(torch.frombuffer(bytearray(raw), dtype=torch.uint8), minlength=256).double()
    frequencies = counts[counts > 0] / counts.sum()
    return float(-(frequencies * frequencies.log()).sum())


def _read(path: Path) -> str:
    if path.is_file():
        return _read_file(path)
    if not path.is_dir():
        raise DataError(f"--data {path}: no such file or directory", hint=f"--data {BUILTIN} needs no file")
    inside = sorted(path.rglob("*"))
    files = [f for f in inside if f.is_file() and not any(p.startswith(".") for p in f.relative_to(path).parts)]
    if not files:
        raise DataError(f"--data {path}: the directory holds no files", hint="put UTF-8 text files in it")
    return "\n".join(_read_file(file) for file in files)


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


class Stream:
    """Training batches in a seeded order; `position` says where it stands and may be set to resume."""

    def __init__(self, tokens: Tensor, batch_size: int, seq_len: int, seed: int) -> None:
        self._windows = _windows(tokens, seq_len, "training")
        self._batch_size = batch_size
        self._seed = seed
        self._order: tuple[int, Tensor] | None = None
        self.position = Position()

    def next(self) -> Batch:
        """The next batch; where an epoch ends within it, it goes on with the next epoch."""
        return _batch(self._windows, self._take())

    def microbatches(self, count: int, rank: int, num_ranks: int) -> Iterator[Batch]:
        """The microbatches of one step that are this rank's; the stream moves on by all `count` of them."""
        for index in range(count):
            chosen = self._take()
            if index % num_ranks == rank:
                yield _batch(self._windows, chosen)

    def _take(self) -> list[int]:
        chosen: list[int] = []
        while len(chosen) < self._batch_size:
            here = self.position
            order = self._epoch_order(here.epoch)
            taken = order[here.window : here.window + self._batch_size - len(chosen)].tolist()
            chosen += taken
            self.position = replace(here, window=here.window + len(taken))
            if self.position.window == len(order):
                self.position = Position(here.epoch + 1)
        return chosen

    def _epoch_order(self, epoch: int) -> Tensor:
        if self._order is None or self._order[0] != epoch:
            draws = philox.uniform((len(self._windows),), philox.key_from(self._seed, "data order", epoch))
            # A stable sort keeps equal draws in place, so the order is a function of the draws alone.
            self._order = (epoch, torch.argsort(draws, stable=True))
        return self._order[1]


def validation_batches(
    tokens: Tensor, batch_size: int, seq_len: int, limit: int, rank: int, num_ranks: int
) -> list[Batch]:
    """This rank's share of the first `limit` validation batches (fewer where the split is shorter), always the same.

    Every rank gets equally many, so that all make the same collectives; the batches that fill up are wholly ignored.
    """
    windows = _windows(tokens, seq_len, "validation")
    count = min(limit, len(windows) // batch_size)
    if count == 0:
        raise DataError(
            f"the validation split has {len(windows)} windows of {seq_len} tokens, fewer than a batch of {batch_size}",
            hint="more --data, a smaller --batch-size or a shorter --seq-len",
        )
    share = []
    for index in range(rank, -(-count // num_ranks) * num_ranks, num_ranks):
        real = index < count
        first = index * batch_size if real else 0
        batch = _batch(windows, list(range(first, first + batch_size)))
        share.append(batch if real else {**batch, "labels": torch.full_like(batch["labels"], IGNORED)})
    return share


def whole_rows(tokens: Tensor) -> Batch:
    """tokens i64[B, S] with the position_ids and segment_ids of rows that are one document each."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens).contiguous()
    return {"tokens": tokens, "position_ids": positions, "segment_ids": torch.zeros_like(tokens)}


def _windows(tokens: Tensor, seq_len: int, split: str) -> Tensor:
    """[windows, S + 1]: a view in which each window's last token is the first of the next."""
    if len(tokens) <= seq_len:
        raise DataError(
            f"the {split} split has {len(tokens)} tokens; one window of --seq-len {seq_len} needs {seq_len + 1}",
            hint="more --data, or a shorter --seq-len",
        )
    return tokens.unfold(0, seq_len + 1, seq_len)


def _batch(windows: Tensor, chosen: list[int]) -> Batch:
    rows = windows[chosen].to(torch.int64)
    return {**whole_rows(rows[:, :-1].contiguous()), "labels": rows[:, 1:].contiguous()}
