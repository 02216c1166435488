"""From rows to batches: a stream of batches that can be resumed anywhere.

What a run learns from is a source of rows, each with S positions and a label for each of them: windows of a text
(`text`), or examples (`packing`). An epoch visits every row once, in an order that depends only on the seed and the
epoch, so where a run stands is two integers: epoch and rows taken.

All ranks walk the same stream. A step has a number of microbatches; microbatch m goes to the data-parallel rank
m modulo their number, and the others step over it. So N ranks with one microbatch each see exactly what one rank with N
microbatches sees, and a run may be resumed on another number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mgraph import philox
from mgraph.errors import OptionError

IGNORED = -100
"""A label that no loss counts."""

VALIDATION = 0.1
"""The share of the data that is kept for validation."""

INPUTS = ("tokens", "labels", "position_ids", "segment_ids")
"""What every batch has, and so what a package may take: each i64[B, S]."""

Batch = dict[str, Tensor]
"""One tensor i64[B, S] for each of `INPUTS`, on the CPU. Documents that share a row have segment_ids of their own, and
position_ids that begin at 0 in each; no label is a token of another document than its position."""

Row = dict[str, Tensor]
"""A batch of one, without the first axis: i64[S] for each of `INPUTS`."""


class Rows(Protocol):
    """The rows of one epoch, in its order; each is made when it is asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Row: ...


class Source(Protocol):
    """Where rows come from. There is at least one."""

    def rows(self, key: philox.Key | None) -> Rows:
        """All rows, in an order that is a function of the key; None: as the data has them."""
        ...


@dataclass(frozen=True)
class Corpus:
    """What a run learns from, and facts of it. Entropy is in nats per byte, of the bytes that are to be learned.

    `identity` has what must be the same for a resumed run to see the same rows; `notes` are lines for the person.
    """

    train: Source
    validation: Source
    tokens_per_byte: float
    unigram_entropy: float
    identity: dict[str, Any]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Position:
    """Where a stream stands: the epoch, and the rows taken of it."""

    epoch: int = 0
    row: int = 0


class Stream:
    """Training batches in a seeded order; `position` says where it stands and may be set to resume."""

    def __init__(self, source: Source, batch_size: int, seed: int) -> None:
        self._source = source
        self._batch_size = batch_size
        self._seed = seed
        self._epoch: tuple[int, Rows] | None = None
        self.position = Position()

    def next(self) -> Batch:
        """The next batch; where an epoch ends within it, it goes on with the next epoch."""
        return next(self.microbatches(1, 0, 1))

    def microbatches(self, count: int, rank: int, num_ranks: int) -> Iterator[Batch]:
        """The microbatches of one step that are this rank's; the stream moves on by all `count` of them."""
        for index in range(count):
            chosen = self._take()
            if index % num_ranks == rank:
                yield _stack([rows[row] for rows, row in chosen])

    def _take(self) -> list[tuple[Rows, int]]:
        chosen: list[tuple[Rows, int]] = []
        while len(chosen) < self._batch_size:
            epoch, first = self.position.epoch, self.position.row
            rows = self._rows(epoch)
            after = min(len(rows), first + self._batch_size - len(chosen))
            chosen += [(rows, row) for row in range(first, after)]
            self.position = Position(epoch, after) if after < len(rows) else Position(epoch + 1)
        return chosen

    def _rows(self, epoch: int) -> Rows:
        if self._epoch is None or self._epoch[0] != epoch:
            rows = self._source.rows(epoch_key(self._seed, epoch))
            assert len(rows), "a source has no rows"
            self._epoch = (epoch, rows)
        return self._epoch[1]


def validation_batches(source: Source, batch_size: int, limit: int, rank: int, num_ranks: int) -> list[Batch]:
    """This rank's share of the first `limit` validation batches (fewer where there are fewer rows), always the same.

    Every rank gets equally many, so that all make the same collectives; what fills up has labels that are all ignored.
    """
    rows = source.rows(None)
    count = min(limit, -(-len(rows) // batch_size))
    ignored, padding = torch.full_like(rows[0]["labels"], IGNORED), torch.zeros_like(rows[0]["segment_ids"])
    filler = {**rows[0], "labels": ignored, "segment_ids": padding}
    share = []
    for index in range(rank, -(-count // num_ranks) * num_ranks, num_ranks):
        places = range(index * batch_size, (index + 1) * batch_size)
        share.append(_stack([rows[at] if index < count and at < len(rows) else filler for at in places]))
    return share


def whole_rows(tokens: Tensor) -> Batch:
    """tokens i64[B, S] with the position_ids and segment_ids of rows that are one document each."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens).contiguous()
    return {"tokens": tokens, "position_ids": positions, "segment_ids": torch.ones_like(tokens)}


def epoch_key(seed: int, epoch: int) -> philox.Key:
    """The key of an epoch's order."""
    return philox.key_from(seed, "data order", epoch)


def shuffled(count: int, key: philox.Key) -> NDArray[np.int64]:
    """The numbers below `count` in an order that is a function of the key."""
    # A stable sort keeps equal draws in place, so the order is a function of the draws alone.
    order: NDArray[np.int64] = torch.argsort(philox.uniform((count,), key), stable=True).numpy()
    return order


def _stack(rows: list[Row]) -> Batch:
    try:
        return {name: torch.stack([row[name] for row in rows]) for name in INPUTS}
    except RuntimeError as error:
        if "allocate" not in str(error):
            raise
        what = f"there is no memory for a batch of {len(rows)} sequences"
        raise OptionError(what, "--batch-size", "fewer, and --accumulate microbatches a step") from error
