"""Packing: every example once an epoch, whole, apart from its neighbours; a function of the key."""

from __future__ import annotations

from itertools import chain, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mgraph import philox
from mgraph.runtime import packing
from mgraph.runtime.data import IGNORED, Row
from mgraph.runtime.examples import Examples
from mgraph.runtime.packing import PackedExamples, pack

Document = tuple[list[int], list[int]]
"""Input tokens and labels."""


def examples_of(lengths: list[int], seed: int = 0) -> Examples:
    """Examples of distinct tokens, so that one is known by any of them; some are targets, the last always."""
    generator = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    targets = generator.random(offsets[-1]) < 0.5
    targets[offsets[:-1]] = False
    targets[offsets[1:] - 1] = True
    return Examples(np.arange(offsets[-1], dtype=np.int32) + 1000, targets, offsets)


def documents(row: Row) -> list[Document]:
    """What a row holds, told apart by its segment ids alone; checks positions and what is left over."""
    tokens, labels, positions, segments = (row[name] for name in ("tokens", "labels", "position_ids", "segment_ids"))
    assert all(value.dtype == torch.int64 and value.shape == tokens.shape for value in row.values())
    real = segments > 0
    assert torch.equal(real, torch.arange(len(tokens)) < real.sum()), "what is left over is at the end"
    assert (labels[~real] == IGNORED).all() and (tokens[~real] == 0).all()
    for segment in range(int(segments.max()) + 1):
        assert torch.equal(positions[segments == segment], torch.arange(int((segments == segment).sum())))
    return [
        (tokens[segments == segment].tolist(), labels[segments == segment].tolist())
        for segment in range(1, int(segments.max()) + 1)
    ]


def expected(examples: Examples, chosen: NDArray[np.int64]) -> list[Document]:
    """Each example by itself."""
    found = []
    for index in chosen:
        place = slice(examples.offsets[index], examples.offsets[index + 1])
        tokens, targets = examples.tokens[place].tolist(), examples.targets[place].tolist()
        labels = [token if target else IGNORED for token, target in zip(tokens, targets, strict=True)]
        found.append((tokens[:-1], labels[1:]))
    return found


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 20), max_size=60),
    seq_len=st.integers(19, 50),
    packed=st.booleans(),
    epoch=st.none() | st.integers(0, 3),
    skip=st.integers(0, 3),
)
def test_every_example_once_and_whole(
    lengths: list[int], seq_len: int, packed: bool, epoch: int | None, skip: int
) -> None:
    examples = examples_of(lengths)
    chosen = np.arange(len(lengths))[skip:]
    key = None if epoch is None else philox.key_from(3, "order", epoch)
    rows = PackedExamples(examples, chosen, seq_len, packed).rows(key)
    found = [documents(rows[index]) for index in range(len(rows))]
    assert all(found), "no row is empty"
    assert sorted(chain.from_iterable(found)) == sorted(expected(examples, chosen))
    assert packed or all(len(row) == 1 for row in found)
    filled = sum(len(tokens) for row in found for tokens, _ in row)
    assert rows.filled == (filled / (len(rows) * seq_len) if found else 0)
    again = PackedExamples(examples, chosen, seq_len, packed).rows(key)
    assert [documents(again[index]) for index in range(len(again))] == found


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 30), max_size=80), capacity=st.integers(30, 60), window=st.integers(1, 90))
def test_pack(lengths: list[int], capacity: int, window: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "WINDOW", window)
        order, starts = pack(np.array(lengths, dtype=np.int64), capacity)
    rows = [order[a:b].tolist() for a, b in pairwise(starts)]
    assert sorted(chain.from_iterable(rows)) == list(range(len(lengths)))
    used = [sum(lengths[index] for index in row) for row in rows]
    assert all(0 < total <= capacity for total in used)
    if window >= len(lengths):
        # Two rows that fit into one would have been one; so all but one are more than half full.
        assert sum(2 * total <= capacity for total in used) <= 1


@pytest.mark.parametrize("kind", [np.uint8, np.int32])
def test_labels_of_bytes_can_be_ignored(kind: type[np.generic]) -> None:
    """Bytes are kept as such, and have no negative numbers."""
    made = Examples(np.array([156, 255, 7, 9]).astype(kind), np.array([0, 0, 1, 1], np.bool_), np.array([0, 4]))
    row = PackedExamples(made, np.arange(1), 5, True).rows(None)[0]
    assert row["tokens"].tolist() == [156, 255, 7, 0, 0]
    assert row["labels"].tolist() == [IGNORED, 7, 9, IGNORED, IGNORED]


def test_best_fit_is_tight() -> None:
    """Lengths that fill rows of 10 exactly, in any order."""
    lengths = np.array([3, 7, 5, 6, 4, 5, 8, 2, 10, 9, 1])
    order, starts = pack(lengths, 10)
    assert len(starts) - 1 == lengths.sum() / 10
    assert all(lengths[order[a:b]].sum() == 10 for a, b in pairwise(starts))


def test_a_length_beyond_a_row_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="longer than a row"):
        pack(np.array([11]), 10)


def test_epochs_differ_and_are_well_filled() -> None:
    generator = np.random.default_rng(1)
    examples = examples_of(generator.integers(2, 65, 3000).tolist())
    source = PackedExamples(examples, np.arange(3000), 128, True)
    epochs = [source.rows(philox.key_from(0, "order", epoch)) for epoch in range(2)]
    first = [[documents(rows[index]) for index in range(len(rows))] for rows in epochs]
    partners = [{frozenset(tokens[0] for tokens, _ in row) for row in epoch} for epoch in first]
    assert len(partners[0] & partners[1]) < 0.5 * len(partners[0]), "other examples share rows"
    assert all(rows.filled > 0.97 for rows in epochs)
    longest = [max(len(tokens) for tokens, _ in row) for row in first[0]]
    quarter = len(longest) // 4
    assert abs(np.mean(longest[:quarter]) - np.mean(longest[-quarter:])) < 3, "long examples come early"
