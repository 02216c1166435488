"""Tokens to text as they come, and the strings that end a text.

Only whole characters are given out: what may still become another one, or the beginning of a string that ends the text,
is kept back until the next token tells. So the pieces put together are the text, however the tokens were cut.
"""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Sequence

from mgraph.runtime.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
"""What stands for bytes that are no character, or not yet."""

_MOST_BEFORE, _MOST_LOOKED_AT = 16, 1024
"""Tokens with a text at the end of a prompt that may tell what its text ends with, and tokens that these are among."""


def id_text(token: int) -> str:
    """What stands for a token in place of a text."""
    return f"token_id:{token}"


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """The text of one token amid others; none for an id that the tokenizer does not have."""
    return bytes(token_bytes(tokenizer, token)).decode("utf-8", errors="replace")


def token_bytes(tokenizer: Tokenizer, token: int) -> list[int]:
    """What it adds to the UTF-8 of a text; nothing for an id that the tokenizer does not have."""
    return list(tokenizer.token_bytes(token)) if token < tokenizer.vocab_size else []


class Detokenizer:
    """The text of one sequence of tokens: what the text of the last few of them gains by one more.

    The tokens before are decoded with it, since a blank, or whether there is one, can depend on what comes before.
    """

    def __init__(self, tokenizer: Tokenizer, special: bool = False, before: Sequence[int] = ()) -> None:
        """`special` writes out special tokens too. The text is what the tokens add to that of those `before`, a prompt;
        of a character that begins there and ends here that is the character."""
        self._tokenizer, self._special = tokenizer, special
        self._context: list[int] = []  # known already, decoded again for what follows
        self._new: list[int] = []
        self._context, self._new = self._ending(before)
        self._known = self._raw = self._gain(self._new)
        """What the prompt shows of its last bytes; what is kept back, with that."""

    @property
    def held(self) -> str:
        """What is kept back, as it would be if nothing came after it."""
        return _behind(self._raw, self._known)

    def add(self, token: int) -> str:
        """The text that is sure with one more token, perhaps none."""
        if token >= self._tokenizer.vocab_size:
            return ""
        raw = self._gain([*self._new, token])
        if raw == self._raw and not self._has_text(token):
            return ""  # what comes after it does not depend on it
        self._new.append(token)
        self._raw = raw
        sure = len(self._new) - self._undecided(self._new)
        while 0 < sure < len(self._new) and self._splits(sure):
            sure -= 1
        return self._release(sure) if sure else ""

    def flush(self) -> str:
        """What was kept back, at the end."""
        return self._release(len(self._new))

    def _release(self, count: int) -> str:
        """Give out the text of so many of the first tokens that were kept back."""
        piece = self._raw if count == len(self._new) else self._gain(self._new[:count])
        known = self._known
        self._context, self._new, self._known = self._new[:count], self._new[count:], ""
        self._raw = self._gain(self._new) if self._new else ""
        return _behind(piece, known)

    def goes_on(self, token: int) -> bool:
        """Whether a token has more of the character that is kept back, or no text."""
        if not self._has_text(token):
            return True
        return self._goes_on(self._begun(self._new), token)

    def _goes_on(self, begun: bytes, token: int) -> bool:
        """Whether a token has more of a character that was begun, or begins one."""
        try:
            codecs.getincrementaldecoder("utf-8")().decode(begun + self._bytes([token])[:1])
        except UnicodeDecodeError:
            return False
        return True

    def _splits(self, at: int) -> bool:
        """Whether a character goes on there: a token may end one and begin another."""
        begun = self._begun(self._new[:at])
        return bool(begun) and self._goes_on(begun, self._new[at])

    def _begun(self, tokens: Sequence[int]) -> bytes:
        """The last bytes of tokens, if they are the beginning of a character."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        decoder.decode(self._bytes(tokens))
        return decoder.getstate()[0]

    def _undecided(self, tokens: Sequence[int]) -> int:
        """How many of the last tokens have a part of a character that may still become whole."""
        begun = len(self._begun(tokens))
        return next(
            count for count in range(len(tokens) + 1) if len(self._bytes(tokens[len(tokens) - count :])) >= begun
        )

    def _ending(self, before: Sequence[int]) -> tuple[list[int], list[int]]:
        """The shortest run of the last tokens of a prompt that are whole characters, and those behind it that are the
        beginning of one. Bytes between that are no text change nothing."""
        far = before[-_MOST_LOOKED_AT:]
        last = list(itertools.islice(filter(self._has_text, reversed(far)), _MOST_BEFORE))[::-1]
        whole = len(last) - self._undecided(last)
        runs = (last[start:end] for end in range(whole, 0, -1) for start in range(end - 1, -1, -1))
        return next(filter(self._is_whole, runs), []), last[whole:]

    def _is_whole(self, tokens: Sequence[int]) -> bool:
        raw = self._bytes(tokens)
        return bool(raw) and raw.decode(errors="ignore").encode() == raw

    def _bytes(self, tokens: Sequence[int]) -> bytes:
        return b"".join(map(self._tokenizer.token_bytes, tokens))

    def _has_text(self, token: int) -> bool:
        """Whether it has one somewhere: a blank may have none by itself."""
        return token < self._tokenizer.vocab_size and bool(self._decode([token, token]))

    def _gain(self, tokens: list[int]) -> str:
        return self._decode(self._context + tokens)[len(self._decode(self._context)) :]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, special=self._special)


def _behind(text: str, known: str) -> str:
    """A text without what it has in common with the beginning of another."""
    pairs = zip(text, known, strict=False)
    return text[sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)) :]


class Starts:
    """Where in the text of a sequence its tokens begin. All tokens of one character begin where that does."""

    def __init__(
        self, tokenizer: Tokenizer | None, special: bool = False, before: Sequence[int] = (), first: int = 0
    ) -> None:
        """As `Detokenizer`; `first` is the place of the first token. Without a tokenizer there is no text."""
        self._text = None if tokenizer is None else Detokenizer(tokenizer, special, before)
        self._sure = first  # characters up to what is kept back

    def add(self, token: int) -> int:
        """The character that the next token begins at. One without a text is where the next text will be."""
        if self._text is None:
            return self._sure
        held = self._text.held
        start = self._sure + len(held.rstrip(REPLACEMENT) if self._text.goes_on(token) else held)
        self._sure += len(self._text.add(token))
        return start

    @property
    def begun(self) -> int:
        """Signs at the end of the text so far that stand for a character which may still become whole."""
        held = "" if self._text is None else self._text.held
        return len(held) - len(held.rstrip(REPLACEMENT))


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
