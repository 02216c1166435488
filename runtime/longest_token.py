"""How many characters of a text one token stands for at most, where a tokenizer has such a bound.

With it a text that is far too long is known to be so without making tokens of it. A bound is claimed only of what
leaves nothing of a text out: byte pairs, over all bytes or with bytes for what is unknown, after steps that keep the
length. Others may write any length as one token, as of an unknown word.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

COMPOSED = 4
"""Characters that normalization form C puts together into one, at most."""

_KEEPING: dict[str, dict[str, tuple[str, ...]]] = {
    "ByteLevel": {},
    "Metaspace": {},
    "Digits": {},
    "Split": {"behavior": ("Isolated", "Contiguous", "MergedWithPrevious", "MergedWithNext")},
}
"""Ways to cut a text before its tokens are made that leave nothing out, and what their settings must be for that."""


def longest_token(library: Any) -> int | None:
    """The most characters that a token of this tokenizer (of the `tokenizers` library) stands for; None: who knows."""
    from tokenizers import models, pre_tokenizers

    model = library.model
    cuts, rewriting = list(_steps(library.pre_tokenizer)), list(_steps(library.normalizer))
    if not isinstance(model, models.BPE) or not all(map(_keeps, cuts)):
        return None
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return None  # of which the vocabulary may lack the forms
    vocabulary = library.get_vocab(with_added_tokens=True)
    if model.byte_fallback:
        all_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    elif any(step["type"] == "ByteLevel" for step in cuts):
        all_bytes = pre_tokenizers.ByteLevel.alphabet()
    else:
        return None
    if not vocabulary.keys() >= set(all_bytes):
        return None
    if any(token.lstrip or token.rstrip for token in library.get_added_tokens_decoder().values()):
        return None  # such a token takes all blanks beside it
    factors = [factor for step in rewriting if (factor := _shrinks(step)) is not None]
    return max(map(len, vocabulary)) * math.prod(factors) if len(factors) == len(rewriting) else None


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer as they are written in the file."""
    if part is None:
        return
    found = json.loads(part.__getstate__())
    several = found.get("normalizers") or found.get("pretokenizers") or [found]
    yield from several


def _keeps(step: dict[str, Any]) -> bool:
    known = _KEEPING.get(step["type"])
    return known is not None and all(step.get(name) in values for name, values in known.items())


def _shrinks(step: dict[str, Any]) -> int | None:
    """Of how many characters a normalizer makes one, at most; None: any number."""
    if step["type"] in ("Prepend", "NFD"):
        return 1
    if step["type"] == "NFC":
        return COMPOSED
    pattern = step.get("pattern", {}).get("String") if step["type"] == "Replace" else None
    return 1 if pattern is not None and len(pattern) <= len(step["content"]) else None
