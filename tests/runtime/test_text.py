"""Text files, the built-in text, their split into windows, and what cannot be read."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from mgraph.errors import DataError
from mgraph.runtime.data import Corpus
from mgraph.runtime.text import BUILTIN, Windows, builtin_text, load_text, unigram_entropy, windows
from mgraph.runtime.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()


def tokens_of(corpus: Corpus) -> tuple[list[int], list[int]]:
    """The tokens that windows of one position cover, which are all."""
    assert isinstance(corpus.train, Windows) and isinstance(corpus.validation, Windows)
    train, validation = corpus.train.tokens, corpus.validation.tokens
    return [*train[:, 0].tolist(), int(train[-1, 1])], [*validation[:, 0].tolist(), int(validation[-1, 1])]


def counts(raw: bytes) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.bincount(list(raw), minlength=256)


def test_unigram_entropy() -> None:
    assert unigram_entropy(counts(b"aaaa")) == 0.0
    assert unigram_entropy(counts(bytes(range(256)) * 3)) == pytest.approx(math.log(256))
    assert unigram_entropy(counts(b"aab")) == pytest.approx(-(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3)))


def test_corpus_of_files_and_split(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "a.txt").write_text("first and long enough ä ")
    (tmp_path / "b" / "c.md").write_text("second" * 20)
    (tmp_path / ".hidden").write_bytes(b"\xff\xfe")
    corpus = load_text(str(tmp_path), BYTES, 1)
    text = "first and long enough ä \n" + "second" * 20
    train, validation = tokens_of(corpus)
    assert bytes(train + validation).decode() == text
    assert len(validation) == round(len(text.encode()) / 10)
    assert corpus.tokens_per_byte == 1.0
    single = load_text(str(tmp_path / "a.txt"), BYTES, 1)
    assert single.identity != corpus.identity


def test_builtin_corpus_is_prose() -> None:
    corpus = load_text(BUILTIN, BYTES, 1)
    assert len(tokens_of(corpus)[0]) > 300_000 and 2.5 < corpus.unigram_entropy < 4.0


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
            load_text(str(tmp_path / name), BYTES, 1)


def test_permission_error_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(DataError, match=r"a.txt cannot be read: Permission denied"):
        load_text(str(tmp_path / "a.txt"), BYTES, 1)


def test_windows_in_order_and_shuffled() -> None:
    source = windows(torch.arange(10, dtype=torch.uint8), 3, "training")
    rows = source.rows(None)
    assert [rows[index]["tokens"].tolist() for index in range(len(rows))] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert all(torch.equal(rows[index]["labels"], rows[index]["tokens"] + 1) for index in range(3))
    assert all(value.dtype == torch.int64 for value in rows[0].values())
    orders = [[int(rows[i]["tokens"][0]) for i in range(3)] for rows in (source.rows((0, n)) for n in range(20))]
    assert all(sorted(order) == [0, 3, 6] for order in orders) and len({tuple(order) for order in orders}) > 2


def test_too_little_text(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="training split has 10 tokens; one window of --seq-len 10 needs 11"):
        windows(torch.arange(10), 10, "training")
    (tmp_path / "a.txt").write_text("x" * 100)
    with pytest.raises(DataError, match="validation split has 10 tokens; one window of --seq-len 10 needs 11"):
        load_text(str(tmp_path / "a.txt"), BYTES, 10)


def test_the_builtin_text_is_english_prose() -> None:
    text = builtin_text()
    assert len(text.encode()) > 300_000
    assert text.count(" the ") > 3_000
    assert text == builtin_text()


def test_its_absence_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(DataError, match="name a text file") as caught:
        builtin_text()
    assert caught.value.hint
