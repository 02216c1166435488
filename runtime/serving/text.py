"""Tokens to text as they come, and the strings that end a text.

Only whole characters are given out: what may still become another one, or the beginning of a string that ends the text,
is kept back until the next token tells. So the pieces put together are the text, however the tokens were cut.
"""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Sequence
from typing import Protocol

from mgraph.runtime.tokenizer import ByteTokenizer, Tokenizer

REPLACEMENT = "\ufffd"
"""What stands for bytes that are no character, or not yet."""

_MOST_HELD = 8
"""Tokens kept back at most; beyond, bytes that are no character are taken for what they are."""

_MOST_UNDECIDED = 3
"""Tokens that may be the beginning of a character: it has at most 4 bytes, and a token at least one."""

_MOST_BEFORE = 16
"""Tokens of a prompt that are looked at for what its text ends with."""


class Detokenizer(Protocol):
    """Text of one sequence of tokens."""

    @property
    def held(self) -> str:
        """What is kept back, as it would be if nothing came after it."""
        ...

    def add(self, token: int) -> str:
        """The text that is sure with one more token, perhaps none."""
        ...

    def flush(self) -> str:
        """What was kept back, at the end."""
        ...


def detokenizer(tokenizer: Tokenizer, special: bool = False, before: Sequence[int] = ()) -> Detokenizer:
    """For one sequence; `special` writes out special tokens too. The text is what the tokens add to that of those
    `before`, a prompt: tokenizers may write no blank where a text begins, and one elsewhere."""
    if isinstance(tokenizer, ByteTokenizer):
        return _Bytes()
    return _Pieces(tokenizer, special, before)


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """The text of one token amid others; none for an id that the tokenizer does not have."""
    return bytes(token_bytes(tokenizer, token)).decode("utf-8", errors="replace")


def token_bytes(tokenizer: Tokenizer, token: int) -> list[int]:
    """What it adds to the UTF-8 of a text; nothing for an id that the tokenizer does not have."""
    return list(tokenizer.token_bytes(token)) if token < tokenizer.vocab_size else []


class _Bytes:
    """Each token a byte. Ids beyond, which a model's vocabulary may have, are no text."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    @property
    def held(self) -> str:
        return self._decoder.getstate()[0].decode("utf-8", errors="replace")

    def add(self, token: int) -> str:
        return self._decoder.decode(bytes([token])) if token < ByteTokenizer.vocab_size else ""

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _Pieces:
    """Any tokenizer: what the text of the last few tokens gains by one more.

    The tokens before are decoded with it, since a blank, or whether there is one, can depend on what comes before.
    """

    def __init__(self, tokenizer: Tokenizer, special: bool, before: Sequence[int]) -> None:
        self._tokenizer, self._special = tokenizer, special
        self._context = self._ending(before)  # known already, decoded again for what follows
        self._new: list[int] = []
        self.held = ""

    def add(self, token: int) -> str:
        if token >= self._tokenizer.vocab_size:
            return ""
        piece = self._gain([*self._new, token])
        if piece == self.held and not self._decode([token, token]):
            return ""  # it has no text wherever it is, and what comes after it does not depend on it
        self._new.append(token)
        self.held = piece
        if not piece or (piece.endswith(REPLACEMENT) and len(self._new) < _MOST_HELD):
            return ""
        decided = self._decided() if piece.endswith(REPLACEMENT) else len(self._new)
        return self._release(decided, piece if decided == len(self._new) else self._gain(self._new[:decided]))

    def flush(self) -> str:
        return self._release(len(self._new), self._gain(self._new))

    def _release(self, count: int, piece: str) -> str:
        """Give out the text of so many of the first tokens that were kept back."""
        self._context, self._new, self.held = self._new[:count], self._new[count:], self.held[len(piece) :]
        return piece

    def _decided(self) -> int:
        """How many tokens can be given out though the last ones may become a character: those before whose text stays
        as it is by these."""
        sizes = [len(self._new) - undecided for undecided in range(_MOST_UNDECIDED, 0, -1)]
        return next((s for s in sizes if self.held.startswith(self._gain(self._new[:s]))), len(self._new))

    def _ending(self, before: Sequence[int]) -> list[int]:
        """The shortest run of the last tokens of a prompt that has a text, one of whole characters. Behind it there may
        be the beginning of a character, which is none in the prompt and becomes none."""
        last = [token for token in before[-_MOST_BEFORE:] if token < self._tokenizer.vocab_size]
        ends = range(len(last), max(0, len(last) - _MOST_UNDECIDED - 1), -1)
        runs = (last[start:end] for end in ends for start in range(end - 1, -1, -1))
        # By itself a run may be no more than a blank that is not written where a text begins.
        return next((run for run in runs if (text := self._decode(run * 2)) and REPLACEMENT not in text), [])

    def _gain(self, tokens: list[int]) -> str:
        return self._decode(self._context + tokens)[len(self._decode(self._context)) :]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, special=self._special)


class Starts:
    """Where in the text of a sequence its tokens begin. All tokens of one character begin where that does."""

    def __init__(
        self, tokenizer: Tokenizer | None, special: bool = False, before: Sequence[int] = (), first: int = 0
    ) -> None:
        """As `detokenizer`; `first` is the place of the first token. Without a tokenizer there is no text."""
        self._text = None if tokenizer is None else detokenizer(tokenizer, special, before)
        self._sure = first  # characters up to what is kept back

    def add(self, token: int) -> int:
        """The character that the next token begins at. One without a text is where the next text will be."""
        if self._text is None:
            return self._sure
        before = self._text.held
        piece = self._text.add(token)
        if piece:
            pairs = zip(before, piece + self._text.held, strict=False)
            start = self._sure + sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        else:  # one more part of a character
            start = self._sure + len(before.rstrip(REPLACEMENT))
        self._sure += len(piece)
        return start


class StopStrings:
    """Finds the first of some strings to be complete in a text that comes in pieces."""

    def __init__(self, stops: Sequence[str], keep: bool = False) -> None:
        """`keep`: the string that ends the text is part of it."""
        self._stops, self._keep = tuple(stops), keep
        self._held = ""
        self._passed = 0
        """Characters at the beginning of what is held that none may end in."""

    def add(self, piece: str, look: bool = True) -> tuple[str, str | None]:
        """The text that can be given out, and the string that ended it, if one did.

        With `look` false none can end in this piece, though it may begin there and end in a later one.
        """
        text, self._held = self._held + piece, ""
        if not look:
            self._passed = len(text)
        found = ((stop, text.find(stop, max(0, self._passed - len(stop) + 1))) for stop in self._stops)
        ends = [(at + len(stop), at, stop) for stop, at in found if at >= 0]
        if ends:
            end, start, stop = min(ends)
            return text[: end if self._keep else start], stop
        sure = len(text) - self._beginning(text)
        self._held, self._passed = text[sure:], max(0, self._passed - sure)
        return text[:sure], None

    def flush(self) -> str:
        """What was kept back, at the end."""
        text, self._held = self._held, ""
        return text

    def _beginning(self, text: str) -> int:
        """The length of the longest end of `text` that is the beginning of one of the strings."""
        longest = 0
        for stop in self._stops:
            sizes = range(min(len(stop) - 1, len(text)), longest, -1)
            longest = next((size for size in sizes if text.endswith(stop[:size])), longest)
        return longest
