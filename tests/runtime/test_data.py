"""Corpora, their errors, and the stream: every window once, resumable, the same on any number of ranks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from mgraph.errors import DataError
from mgraph.runtime.data import (
    BUILTIN,
    IGNORED,
    INPUTS,
    Position,
    Stream,
    load_corpus,
    unigram_entropy,
    validation_batches,
)
from mgraph.runtime.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()


def test_labels_are_the_next_tokens() -> None:
    stream = Stream(torch.arange(1000), batch_size=3, seq_len=7, seed=0)
    batch = stream.next()
    assert set(batch) == set(INPUTS)
    assert all(tensor.shape == (3, 7) and tensor.dtype == torch.int64 for tensor in batch.values())
    assert torch.equal(batch["labels"], batch["tokens"] + 1)
    assert batch["position_ids"].tolist() == [list(range(7))] * 3 and not batch["segment_ids"].any()


@pytest.mark.parametrize(("length", "seq_len"), [(1000, 7), (1001, 10), (11, 10), (1000, 333)])
def test_an_epoch_visits_each_window_once(length: int, seq_len: int) -> None:
    count = (length - 1) // seq_len
    stream = Stream(torch.arange(length), batch_size=1, seq_len=seq_len, seed=5)
    epochs = [[int(stream.next()["tokens"][0, 0]) for _ in range(count)] for _ in range(2)]
    assert stream.position == Position(2, 0)
    assert sorted(epochs[0]) == sorted(epochs[1]) == [seq_len * index for index in range(count)]
    if count > 5:
        assert epochs[0] != epochs[1] and epochs[0] != sorted(epochs[0])


def test_order_depends_on_the_seed_only() -> None:
    def first(seed: int) -> list[int]:
        return Stream(torch.arange(5000), 16, 8, seed).next()["tokens"][:, 0].tolist()

    assert first(1) == first(1) != first(2)


def test_batches_cross_epochs_and_resume_anywhere() -> None:
    """A batch larger than the corpus runs through several epochs."""
    tokens = torch.arange(61)  # 10 windows of 6
    whole = Stream(tokens, batch_size=7, seq_len=6, seed=0)
    batches = [whole.next()["tokens"] for _ in range(9)]
    for start in range(9):
        again = Stream(tokens, batch_size=7, seq_len=6, seed=0)
        for _ in range(start):
            again.next()
        resumed = Stream(tokens, batch_size=7, seq_len=6, seed=0)
        resumed.position = again.position
        assert all(torch.equal(resumed.next()["tokens"], batch) for batch in batches[start:])
    wide = Stream(tokens, batch_size=25, seq_len=6, seed=0)
    assert wide.next()["tokens"].shape == (25, 6) and wide.position == Position(2, 5)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 6])
def test_ranks_share_the_microbatches_of_one_rank(num_ranks: int) -> None:
    tokens = torch.arange(997)
    alone = Stream(tokens, batch_size=5, seq_len=9, seed=1)
    ranks = [Stream(tokens, batch_size=5, seq_len=9, seed=1) for _ in range(num_ranks)]
    for _ in range(4):
        expected = [batch["tokens"] for batch in alone.microbatches(6, 0, 1)]
        shares = [[b["tokens"] for b in stream.microbatches(6, rank, num_ranks)] for rank, stream in enumerate(ranks)]
        merged = [shares[index % num_ranks][index // num_ranks] for index in range(6)]
        assert all(torch.equal(a, b) for a, b in zip(merged, expected, strict=True))
        assert all(stream.position == alone.position for stream in ranks)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_validation_is_shared_and_filled_up_with_ignored_batches(num_ranks: int) -> None:
    tokens = torch.arange(10 * 7 + 1)
    shares = [validation_batches(tokens, 2, 7, 3, rank, num_ranks) for rank in range(num_ranks)]
    assert len({len(share) for share in shares}) == 1
    real = [batch for share in shares for batch in share if (batch["labels"] != IGNORED).all()]
    assert sorted(int(batch["tokens"][0, 0]) for batch in real) == [0, 14, 28]
    filler = [batch for share in shares for batch in share if (batch["labels"] == IGNORED).any()]
    assert all((batch["labels"] == IGNORED).all() for batch in filler)
    assert len(real) == 3 and len(filler) == len(shares[0]) * num_ranks - 3


def test_unigram_entropy() -> None:
    assert unigram_entropy(b"aaaa") == 0.0
    assert unigram_entropy(bytes(range(256)) * 3) == pytest.approx(math.log(256))
    assert unigram_entropy(b"aab") == pytest.approx(-(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3)))


def test_corpus_of_files_and_split(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "a.txt").write_text("first ä ")
    (tmp_path / "b" / "c.md").write_text("second" * 20)
    (tmp_path / ".hidden").write_bytes(b"\xff\xfe")
    corpus = load_corpus(str(tmp_path), BYTES)
    text = "first ä \n" + "second" * 20
    assert bytes(torch.cat([corpus.train, corpus.validation]).tolist()).decode() == text
    assert len(corpus.validation) == round(len(text.encode()) / 10)
    assert corpus.tokens_per_byte == 1.0
    single = load_corpus(str(tmp_path / "a.txt"), BYTES)
    assert single.fingerprint != corpus.fingerprint


def test_builtin_corpus_is_prose() -> None:
    corpus = load_corpus(BUILTIN, BYTES)
    assert len(corpus.train) > 300_000 and 2.5 < corpus.unigram_entropy < 4.0


def test_unreadable_corpora(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("grüße".encode("latin-1"))
    (tmp_path / "binary.bin").write_bytes(b"ELF\0\0\1")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "nothing").mkdir()
    cases = {
        "absent.txt": "absent.txt: no such file or directory",
        "latin.txt": "latin.txt is not UTF-8 text: byte 0xfc at offset 2",
        "binary.bin": "binary.bin is a binary file: it has a zero byte at offset 3",
        "empty.txt": "empty.txt holds no text",
        "nothing": "nothing: the directory holds no files",
    }
    for name, message in cases.items():
        with pytest.raises(DataError, match=message):
            load_corpus(str(tmp_path / name), BYTES)


def test_permission_error_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(DataError, match=r"a.txt cannot be read: Permission denied"):
        load_corpus(str(tmp_path / "a.txt"), BYTES)


def test_too_little_text() -> None:
    with pytest.raises(DataError, match="training split has 10 tokens; one window of --seq-len 10 needs 11"):
        Stream(torch.arange(10), 1, 10, 0)
    with pytest.raises(DataError, match="validation split has 3 windows of 5 tokens, fewer than a batch of 4"):
        validation_batches(torch.arange(16), 4, 5, 1, 0, 1)
