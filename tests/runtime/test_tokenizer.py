"""Bytes and tokenizer files."""

from __future__ import annotations

import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mgraph.errors import DataError
from mgraph.runtime.tokenizer import ByteTokenizer, FileTokenizer, holds_tokenizer, load_tokenizer
from tests.runtime.chats import CHATML, MARKED, write_tokenizer


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


def test_other_threads_go_on_while_a_long_text_is_encoded(tokenizer_file: Path) -> None:
    tokenizer, text = FileTokenizer(tokenizer_file), "the fox the dog " * 20_000
    begun = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        encoded = thread.submit(lambda: (begun.wait(), tokenizer.encode(text))[1])
        turns = 0
        begun.set()
        while not encoded.done():
            time.sleep(0.002)
            turns += 1
    assert turns > 5 and encoded.result().tolist() == [1, 2, 1, 3] * 20_000


def test_errors(tokenizer_file: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has 4 tokens, the model knows 3"):
        load_tokenizer(tokenizer_file, 3)
    with pytest.raises(DataError, match=r"texts are bytes, which are 256 tokens, the model knows 100"):
        load_tokenizer(None, 100)
    with pytest.raises(DataError, match=r"no such file"):
        load_tokenizer(tmp_path / "absent.json", 256)
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(DataError, match=r"broken.json cannot be read"):
        load_tokenizer(tmp_path / "broken.json", 256)


def test_bytes_know_their_characters() -> None:
    ids, starts, ends = ByteTokenizer().encode_batch(["aé漢😀b"])[0]
    assert bytes(ids.tolist()).decode() == "aé漢😀b"
    assert starts.tolist() == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3, 4]
    assert ends.tolist() == [start + 1 for start in starts.tolist()]
    assert ByteTokenizer().encode_batch([""])[0].ids.tolist() == []


@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
def test_directory_equals_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    theirs = write_tokenizer(tmp_path, MARKED, pad_token="<|turn|>", **config)
    ours = FileTokenizer(tmp_path)
    texts = ["the quick brown fox", "  says\n<|im_end|>Ünïcode 漢😀", "", "<|begin|>"]
    for text, encoding in zip(texts, ours.encode_batch(texts), strict=True):
        expected = theirs(text, add_special_tokens=False, return_offsets_mapping=True)
        assert encoding.ids.tolist() == ours.encode(text).tolist() == expected["input_ids"]
        assert list(zip(encoding.starts.tolist(), encoding.ends.tolist(), strict=True)) == expected["offset_mapping"]
        assert [*ours.prefix, *encoding.ids.tolist()] == theirs(text)["input_ids"]
    assert len(ours.prefix) == config.get("add_bos_token", False)
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.token_id("<|end|>") == theirs.eos_token_id and ours.token_id("<|none|>") is None
    assert (ours.vocab_size, ours.name, ours.chat_template) == (len(theirs), tmp_path.name, MARKED)
    bare = FileTokenizer(tmp_path / "tokenizer.json")
    assert (bare.special_tokens, bare.chat_template, bare.prefix) == ({}, None, ours.prefix)


def test_lengths_of_the_file_do_not_count(tmp_path: Path) -> None:
    """A tokenizer.json may have been saved while it cut and padded."""
    theirs = write_tokenizer(tmp_path)
    theirs.backend_tokenizer.enable_truncation(3)
    theirs.backend_tokenizer.enable_padding(length=5)
    theirs.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    lengths = [len(encoding.ids) for encoding in FileTokenizer(tmp_path).encode_batch(["xyzxyz", "x"])]
    assert lengths == [6, 1]


def test_templates_and_tokens_of_a_configuration(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, CHATML)
    (tmp_path / "chat_template.jinja").unlink()
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    for written, expected in (("one", "one"), (several, "d"), (several[:1], None), (None, None)):
        config = {"chat_template": written, "eos_token": {"content": "<|end|>", "lstrip": False}, "bos_token": None}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        tokenizer = FileTokenizer(tmp_path)
        assert tokenizer.chat_template == expected
        assert tokenizer.special_tokens == {"eos_token": "<|end|>"}


def test_errors_of_directories(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "a")
    for text, message in (
        ("{", "tokenizer_config.json cannot be read: "),
        ("[]", "is no JSON object"),
        ('{"eos_token": 5}', "tokenizer_config.json: eos_token is 5: must be text"),
        ('{"bos_token": {"lstrip": true}}', 'bos_token is {"lstrip": true}: must be text'),
        ('{"pad_token": {"content": 1}}', 'pad_token is {"content": 1}: must be text'),
    ):
        (tmp_path / "a" / "tokenizer_config.json").write_text(text)
        with pytest.raises(DataError, match=message):
            FileTokenizer(tmp_path / "a")
    (tmp_path / "a" / "tokenizer_config.json").unlink()
    (tmp_path / "a" / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"chat_template.jinja cannot be read: .*invalid start byte"):
        FileTokenizer(tmp_path / "a")
    shutil.rmtree(tmp_path / "a")
    (tmp_path / "a").mkdir()
    with pytest.raises(DataError, match=r"a holds no tokenizer.json"):
        load_tokenizer(tmp_path / "a", 256)


def test_older_files_of_a_directory(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(["the fox and the dog and the hen"], trainer)
    library.model.save(str(tmp_path))
    assert (tmp_path / "vocab.json").is_file() and (tmp_path / "merges.txt").is_file()
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<end>", "bos_token": "<end>", "unk_token": "<end>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path, 300)
    text = "the dog, the 日 and"
    assert (
        tokenizer.encode(text).tolist() == library.encode(text).ids
        and tokenizer.decode(library.encode(text).ids) == text
    )
    assert tokenizer.special_tokens["eos_token"] == "<end>" and tokenizer.token_id("<end>") == library.token_to_id(
        "<end>"
    )


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds a tokenizer_config.json, but no tokenizer.json and no other vocabulary"),
        ({"tokenizer.model": "no model"}, "holds no tokenizer.json, and tokenizer.model cannot be read: "),
        ({"vocab.txt": ""}, "holds no tokenizer.json, and vocab.txt cannot be read: it gives nothing but special"),
    ],
)
def test_older_files_that_cannot_be_read(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, text in {"tokenizer_config.json": '{"tokenizer_class": "LlamaTokenizer"}', **files}.items():
        (tmp_path / name).write_text(text)
    assert holds_tokenizer(tmp_path)
    with pytest.raises(DataError, match=message) as caught:
        load_tokenizer(tmp_path, 300)
    assert "tokenizer.json of the model" in str(caught.value.hint) or "save_pretrained" in str(caught.value.hint)


def test_a_vocabulary_with_gaps(tmp_path: Path) -> None:
    """All its ids are below the size, which is more than the number of its entries."""
    from tokenizers import Tokenizer, models

    library = Tokenizer(models.WordLevel({"a": 0, "b": 7}, unk_token="a"))
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = FileTokenizer(tmp_path)
    assert tokenizer.vocab_size == 8 and tokenizer.decode([7]) == "b"
