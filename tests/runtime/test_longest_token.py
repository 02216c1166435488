"""No text has fewer tokens than its length says, by the tokenizers library itself."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from mgraph.runtime.longest_token import longest_token
from mgraph.runtime.tokenizer import ByteTokenizer

ALPHABET = {character: at for at, character in enumerate(pre_tokenizers.ByteLevel.alphabet())}
COMBINED = ["a\u0302\u0301", "\u03b1\u0313\u0301\u0345", "\u1100\u1161\u11a8"]
PIECES = ["the quick", "          ", "\n\n\n", "漢字", "😀", *COMBINED, "\0", "<|end|>", "''"]
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
SPLIT = pre_tokenizers.Split(Regex(r"\s+"), "isolated")
SPACES = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def texts() -> list[str]:
    """Random ones, and each piece many times."""
    draw = random.Random(0)
    return ["".join(draw.choices(PIECES, k=n)) for n in range(1, 30)] + [piece * 200 for piece in PIECES]


def byte_pairs() -> Any:
    """Over bytes, trained on the texts: some tokens are long."""
    library = Tokenizer(models.BPE())
    library.pre_tokenizer, library.decoder = BYTE_LEVEL, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    more: dict[str, Any] = {"special_tokens": ["<|end|>"], "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, **more)
    library.train_from_iterator(texts(), trainer)
    return library


def with_bytes_for_the_unknown(lacking: int = 0) -> Any:
    """Characters, some words, and bytes for all others, or for all but `lacking`."""
    words = ["▁", "t", "h", "e", "th", "the", "▁the", *(f"<0x{byte:02X}>" for byte in range(lacking, 256))]
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    library = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, merges, byte_fallback=True, fuse_unk=True))
    library.normalizer = SPACES
    return library


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC(), normalizers.NFD(), SPACES], ids=str)
@pytest.mark.parametrize("cut", [BYTE_LEVEL, pre_tokenizers.Sequence([SPLIT, BYTE_LEVEL])], ids=["bytes", "split"])
def test_byte_pairs(normalizer: Any, cut: Any) -> None:
    library = byte_pairs()
    if normalizer is not None:
        library.normalizer = normalizer
    library.pre_tokenizer = cut
    most = longest_token(library)
    assert most is not None
    assert most == max(map(len, library.get_vocab())) * (4 if isinstance(normalizer, normalizers.NFC) else 1)
    for text in texts():
        assert len(text) <= most * len(library.encode(text).ids)


def test_bytes_for_the_unknown() -> None:
    library = with_bytes_for_the_unknown()
    assert longest_token(library) == 6
    assert all(len(text) <= 6 * len(library.encode(text).ids) for text in texts())
    assert longest_token(with_bytes_for_the_unknown(lacking=1)) is None, "a zero byte would be left out"


def test_the_bound_is_reached() -> None:
    library = byte_pairs()
    most = longest_token(library)
    longest = max(library.get_vocab(), key=len)
    text = decoders.ByteLevel().decode([longest])
    assert len(text.encode()) == most and len(library.encode(text).ids) == 1, "in bytes"
    tokens = ByteTokenizer().encode("x" * 100)
    assert len(tokens) == 100 and ByteTokenizer.longest_token == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("normalizer", normalizers.Lowercase()),
        ("normalizer", normalizers.Replace(Regex(" +"), " ")),
        ("normalizer", normalizers.Replace("  ", " ")),
        ("normalizer", normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])),
        ("pre_tokenizer", pre_tokenizers.Whitespace()),
        ("pre_tokenizer", pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), BYTE_LEVEL])),
        ("pre_tokenizer", SPLIT),
        ("model", models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")),
        ("model", models.BPE({"a": 0}, [])),
        ("model", models.BPE(ALPHABET, [], end_of_word_suffix="</w>")),
    ],
)
def test_what_may_leave_something_out_has_no_bound(name: str, value: Any) -> None:
    library = byte_pairs()
    setattr(library, name, value)
    assert longest_token(library) is None


def test_a_token_that_takes_blanks_has_no_bound() -> None:
    library = byte_pairs()
    library.add_special_tokens([AddedToken("<|blank|>", lstrip=True)])
    assert len(library.encode(" " * 1000 + "<|blank|>").ids) == 1 and longest_token(library) is None
