"""The bytes that one token stands for, also where they are part of a character.

The text of such a token by itself is a replacement sign. What its bytes are is in how its vocabulary writes it: with a
printable character for each of the 256 bytes (`ByteLevel`, as in GPT-2), or as `<0xE6>` (`ByteFallback`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
"""Bytes that are written as the character of the same number; the others follow from number 256 on."""


def token_bytes(library: Any, token: int) -> bytes:
    """Those of a token of this tokenizer (of the `tokenizers` library), as it stands amid a text: blanks that only the
    first token of a text loses are there."""
    written: str = library.id_to_token(token) or ""
    kinds = set(_kinds(library.decoder))
    byte_of = _byte_of()
    if "ByteLevel" in kinds:
        known = all(character in byte_of for character in written)
        return bytes(byte_of[character] for character in written) if known else written.encode()
    found = _FALLBACK.fullmatch(written) if "ByteFallback" in kinds else None
    if found is not None:
        return bytes([int(found[1], 16)])
    once, twice = (library.decode([token] * times, skip_special_tokens=False) for times in (1, 2))
    return str(twice[len(once) :]).encode()


@cache
def _byte_of() -> dict[str, int]:
    others = [byte for byte in range(256) if byte not in _PRINTABLE]
    return {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + at): byte for at, byte in enumerate(others)}


def _kinds(decoder: Any) -> Iterator[str]:
    """The steps of a decoder, by the names that they have in the file."""
    if decoder is None:
        return
    found = json.loads(decoder.__getstate__())
    yield from (step["type"] for step in found.get("decoders", [found]))
