"""Bytes and tokenizer files."""

from __future__ import annotations

from pathlib import Path

import pytest

from mgraph.errors import DataError
from mgraph.runtime.tokenizer import ByteTokenizer, load_tokenizer


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"[UNK]": 0, "the": 1, "fox": 2, "dog": 3}
    library = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    path = tmp_path / "tokenizer.json"
    library.save(str(path))
    return path


def test_bytes_round_trip() -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode("naïve\n").tolist()
    assert ids == list("naïve\n".encode())
    assert tokenizer.decode(ids) == "naïve\n"
    assert tokenizer.decode([65, 0xC3]) == "A\ufffd"


def test_file(tokenizer_file: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_file, 256)
    assert tokenizer.vocab_size == 4
    assert tokenizer.encode("the dog the cat").tolist() == [1, 3, 1, 0]
    assert tokenizer.decode([1, 2]) == "the fox"


def test_errors(tokenizer_file: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has 4 tokens, the model knows 3"):
        load_tokenizer(tokenizer_file, 3)
    with pytest.raises(DataError, match=r"'bytes' has 256 tokens, the model knows 100"):
        load_tokenizer(None, 100)
    with pytest.raises(DataError, match=r"no such file"):
        load_tokenizer(tmp_path / "absent.json", 256)
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(DataError, match=r"broken.json cannot be read"):
        load_tokenizer(tmp_path / "broken.json", 256)
