"""The stream: every row once, resumable, the same on any number of ranks; for windows of text and packed examples."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import pytest
import torch

from mgraph.runtime import packing
from mgraph.runtime.data import (
    IGNORED,
    INPUTS,
    Batch,
    Position,
    Source,
    Stream,
    epoch_key,
    validation_batches,
    whole_rows,
)
from mgraph.runtime.examples import Examples
from mgraph.runtime.packing import PackedExamples
from mgraph.runtime.text import windows


def text(length: int, seq_len: int) -> Source:
    """Windows of the numbers below `length`."""
    return windows(torch.arange(length), seq_len, "training")


def examples(count: int, seq_len: int) -> PackedExamples:
    """Packed examples of 2 to `seq_len` + 1 tokens, all different."""
    lengths = np.random.default_rng(0).integers(2, seq_len + 2, count)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = np.arange(offsets[-1], dtype=np.int32)
    made = Examples(tokens, np.ones(len(tokens), np.bool_), offsets)
    return PackedExamples(made, np.arange(count), seq_len, pack=True)


SOURCES: dict[str, Source] = {"text": text(997, 9), "examples": examples(300, 20)}


def equal(found: Batch, expected: Batch) -> bool:
    return all(torch.equal(found[name], expected[name]) for name in INPUTS)


def test_labels_are_the_next_tokens() -> None:
    stream = Stream(text(1000, 7), batch_size=3, seed=0)
    batch = stream.next()
    assert set(batch) == set(INPUTS)
    assert all(tensor.shape == (3, 7) and tensor.dtype == torch.int64 for tensor in batch.values())
    assert torch.equal(batch["labels"], batch["tokens"] + 1)
    assert batch["position_ids"].tolist() == [list(range(7))] * 3 and (batch["segment_ids"] == 1).all()


@pytest.mark.parametrize(("length", "seq_len"), [(1000, 7), (1001, 10), (11, 10), (1000, 333)])
def test_an_epoch_visits_each_window_once(length: int, seq_len: int) -> None:
    count = (length - 1) // seq_len
    stream = Stream(text(length, seq_len), batch_size=1, seed=5)
    epochs = [[int(stream.next()["tokens"][0, 0]) for _ in range(count)] for _ in range(2)]
    assert stream.position == Position(2, 0)
    assert sorted(epochs[0]) == sorted(epochs[1]) == [seq_len * index for index in range(count)]
    if count > 5:
        assert epochs[0] != epochs[1] and epochs[0] != sorted(epochs[0])


def test_order_depends_on_the_seed_only() -> None:
    def first(seed: int) -> list[int]:
        return Stream(text(5000, 8), 16, seed).next()["tokens"][:, 0].tolist()

    assert first(1) == first(1) != first(2)


@pytest.mark.parametrize("name", SOURCES)
def test_batches_cross_epochs_and_resume_anywhere(name: str) -> None:
    """Batches of a third of an epoch or more, so that many of them go on with the next."""
    source = SOURCES[name]
    size = len(source.rows(None)) // 3 + 5
    whole = Stream(source, size, seed=0)
    batches = [whole.next() for _ in range(9)]
    assert whole.position.epoch >= 3 and all(batch["tokens"].shape[0] == size for batch in batches)
    again = Stream(source, size, seed=0)
    for start in range(9):
        resumed = Stream(source, size, seed=0)
        resumed.position = again.position
        assert all(equal(resumed.next(), batch) for batch in batches[start:])
        again.next()


def test_a_batch_may_be_larger_than_an_epoch() -> None:
    wide = Stream(text(61, 6), batch_size=25, seed=0)
    assert wide.next()["tokens"].shape == (25, 6) and wide.position == Position(2, 5)


def test_an_epoch_of_packed_examples_has_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows an epoch has, which differs where few are packed together; the next begins where it ends."""
    monkeypatch.setattr(packing, "WINDOW", 30)
    source = examples(300, 20)
    counts = [len(source.rows(epoch_key(3, epoch))) for epoch in range(20)]
    assert len(set(counts)) > 1
    stream = Stream(source, batch_size=1, seed=3)
    for epoch, count in enumerate(counts):
        rows = [stream.next() for _ in range(count)]
        begins = [row["tokens"][(row["position_ids"] == 0) & (row["segment_ids"] > 0)].tolist() for row in rows]
        assert sorted(chain.from_iterable(begins)) == source.examples.offsets[:-1].tolist()
        assert stream.position == Position(epoch + 1, 0)


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 6])
def test_ranks_share_the_microbatches_of_one_rank(num_ranks: int, name: str) -> None:
    source = SOURCES[name]
    alone = Stream(source, batch_size=5, seed=1)
    ranks = [Stream(source, batch_size=5, seed=1) for _ in range(num_ranks)]
    for _ in range(8):
        expected = list(alone.microbatches(6, 0, 1))
        shares = [list(stream.microbatches(6, rank, num_ranks)) for rank, stream in enumerate(ranks)]
        merged = [shares[index % num_ranks][index // num_ranks] for index in range(6)]
        assert all(equal(a, b) for a, b in zip(merged, expected, strict=True))
        assert all(stream.position == alone.position for stream in ranks)
    assert alone.position.epoch > 0


def firsts(batches: Sequence[Batch]) -> list[int]:
    """The first tokens of rows that have a label."""
    rows = [(tokens, labels) for b in batches for tokens, labels in zip(b["tokens"], b["labels"], strict=True)]
    return [int(tokens[0]) for tokens, labels in rows if (labels != IGNORED).any()]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize(("limit", "expected"), [(3, range(6)), (4, range(8)), (5, range(9)), (50, range(9))])
def test_validation_is_shared_and_filled_up_with_ignored_rows(num_ranks: int, limit: int, expected: range) -> None:
    """9 rows in batches of 2: each once, in the order of the data, equally many batches for every rank."""
    shares = [validation_batches(text(9 * 7 + 1, 7), 2, limit, rank, num_ranks) for rank in range(num_ranks)]
    assert len({len(share) for share in shares}) == 1
    found = [firsts([share[index] for share in shares]) for index in range(len(shares[0]))]
    assert list(chain.from_iterable(found)) == [7 * index for index in expected]
    assert all(batch["tokens"].shape == (2, 7) for share in shares for batch in share)
    labels = torch.cat([batch["labels"].flatten() for share in shares for batch in share])
    assert int((labels != IGNORED).sum()) == 7 * len(expected)
    segments = torch.cat([batch["segment_ids"].flatten() for share in shares for batch in share])
    assert torch.equal(segments != 0, labels != IGNORED), "no expert gets what fills up"


def test_whole_rows() -> None:
    batch = whole_rows(torch.tensor([[5, 6, 7], [8, 9, 10]]))
    assert batch["position_ids"].tolist() == [[0, 1, 2]] * 2 and batch["segment_ids"].tolist() == [[1, 1, 1]] * 2
