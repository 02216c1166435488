"""Bytes of single tokens, by the tokenizers library itself."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mgraph.runtime.token_bytes import token_bytes
from mgraph.runtime.tokenizer import ByteTokenizer

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())


def test_every_byte_of_a_byte_level_vocabulary() -> None:
    """Each is what the library writes it as; two tokens of two bytes put together are a character."""
    library = Tokenizer(models.BPE({letter: at for at, letter in enumerate(LETTERS)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken("<|日|>", special=True)])
    assert sorted(token_bytes(library, token)[0] for token in range(256)) == list(range(256))
    for text in ("\0\x7f\xa0 \xad~", "größer 日本 👩\u200d🚀"):
        ids = library.encode(text, add_special_tokens=False).ids
        assert b"".join(token_bytes(library, token) for token in ids) == text.encode()
    assert token_bytes(library, 256) == "<|日|>".encode()


@pytest.mark.parametrize(
    ("written", "expected"), [("<0xE6>", b"\xe6"), ("▁and", b" and"), ("and", b"and"), ("▁", b" ")]
)
def test_a_vocabulary_with_bytes_for_what_is_unknown(written: str, expected: bytes) -> None:
    library = Tokenizer(models.BPE({written: 0, "x": 1}, []))
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    assert token_bytes(library, 0) == expected
    library.decoder = decoders.Metaspace()
    assert token_bytes(library, 0) == (b"<0xE6>" if written == "<0xE6>" else expected)


def test_bytes_are_themselves() -> None:
    assert [ByteTokenizer().token_bytes(byte) for byte in (0, 0xE6)] == [b"\0", b"\xe6"]
