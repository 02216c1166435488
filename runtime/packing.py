"""Rows of S positions made of whole examples.

An example of n tokens takes n - 1 positions: each token but the last is an input, its label the token after it. So no
label is ever a token of another example. Several examples stand in a row one behind the other; `position_ids` begin at
0 in each, `segment_ids` number them from 1, and what is left of a row is segment 0, padding, whose labels are ignored.
A package that takes no segment ids gets one example a row.

Which examples share a row is decided anew in each epoch: they are shuffled, and each run of `WINDOW` of them is packed
by best fit, the longest first. The rows are shuffled once more, since those of a run are made in order of length. All
of it is a function of the key.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mgraph import philox
from mgraph.runtime.data import IGNORED, Row, shuffled
from mgraph.runtime.examples import Examples

WINDOW = 4096
"""Examples that are packed together: enough to fill rows well, few against a data set, so that epochs differ."""


@dataclass(frozen=True)
class PackedExamples:
    """The examples `chosen` of a set, as rows of `seq_len` positions; one to a row unless `pack`."""

    examples: Examples
    chosen: NDArray[np.int64]
    seq_len: int
    pack: bool

    def rows(self, key: philox.Key | None) -> PackedRows:
        """All rows of an epoch; `key` None leaves the examples in their order."""
        order = self.chosen if key is None else self.chosen[shuffled(len(self.chosen), key)]
        lengths = self.examples.positions[order]
        places, starts = pack(lengths, self.seq_len) if self.pack else _one_each(len(order))
        count = len(starts) - 1
        turn = np.arange(count) if key is None else shuffled(count, philox.key_from(*key, "rows"))
        return PackedRows(self.examples, order[places], starts, turn, self.seq_len)


@dataclass(frozen=True)
class PackedRows:
    """Row i has the examples `order[starts[t]:starts[t + 1]]`, t = `turn[i]`."""

    examples: Examples
    order: NDArray[np.int64]
    starts: NDArray[np.int64]
    turn: NDArray[np.int64]
    seq_len: int

    def __len__(self) -> int:
        return len(self.turn)

    def __getitem__(self, index: int) -> Row:
        """One row."""
        which = int(self.turn[index])
        row: dict[str, NDArray[Any]] = {
            "tokens": np.zeros(self.seq_len, np.int64),
            "labels": np.full(self.seq_len, IGNORED, np.int64),
            "position_ids": np.zeros(self.seq_len, np.int64),
            "segment_ids": np.zeros(self.seq_len, np.int64),
        }
        at = 0
        for segment, example in enumerate(self.order[self.starts[which] : self.starts[which + 1]], start=1):
            first, last = self.examples.offsets[example], self.examples.offsets[example + 1] - 1
            place = slice(at, at + int(last - first))
            row["tokens"][place] = self.examples.tokens[first:last]
            # Tokens may be bytes, which have no room for what is ignored.
            following = self.examples.tokens[first + 1 : last + 1].astype(np.int64)
            row["labels"][place] = np.where(self.examples.targets[first + 1 : last + 1], following, IGNORED)
            row["position_ids"][place] = np.arange(last - first)
            row["segment_ids"][place] = segment
            at = place.stop
        row["position_ids"][at:] = np.arange(self.seq_len - at)
        return {name: torch.from_numpy(values) for name, values in row.items()}

    @property
    def filled(self) -> float:
        """The share of all positions that are an example's."""
        return float(self.examples.positions[self.order].sum()) / max(1, len(self) * self.seq_len)


def pack(lengths: NDArray[np.int64], capacity: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices into `lengths`, row after row, and where each row starts among them (with the end of the last).

    Best fit decreasing (Johnson 1974) within each run of `WINDOW`: an item goes to the row with the least room that
    suffices. No length may exceed `capacity`.
    """
    assert (lengths <= capacity).all(), "an example is longer than a row"
    rows: list[list[int]] = []
    for first in range(0, len(lengths), WINDOW):
        window = lengths[first : first + WINDOW]
        open_rows: list[tuple[int, int]] = []  # (room, row), by room
        for index in np.argsort(-window, kind="stable").tolist():
            length = int(window[index])
            found = bisect_left(open_rows, (length, 0))
            if found < len(open_rows):
                room, row = open_rows.pop(found)
            else:
                room, row = capacity, len(rows)
                rows.append([])
            rows[row].append(first + index)
            insort(open_rows, (room - length, row))
    starts = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64)
    return np.array([index for row in rows for index in row], dtype=np.int64), starts


def _one_each(count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return np.arange(count), np.arange(count + 1)
