"""What one sequence has said so far, and whether the last token ended it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mgraph.runtime.serving.parameters import SamplingParams
from mgraph.runtime.serving.text import Detokenizer, StopStrings
from mgraph.runtime.tokenizer import Tokenizer


@dataclass(frozen=True)
class Said:
    """What one more token brings: text that is sure now, and how the sequence ended, if it did."""

    text: str
    finish_reason: str | None = None
    """`stop` or `length`."""
    stop_reason: int | str | None = None
    """The token or string that stopped it; None for the tokenizer's end of text."""


class Continuation:
    """The text of one sequence. Tokens and strings that end it are not part of it, unless that was asked for."""

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        max_tokens: int,
        tokenizer: Tokenizer | None,
        ends_of_text: Iterable[int],
    ) -> None:
        self._params, self._max_tokens = params, max_tokens
        self._ends = frozenset() if params.ignore_eos else frozenset(ends_of_text)
        self._stops = frozenset(params.stop_token_ids)
        self._count = 0
        self._text: Detokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._text = Detokenizer(tokenizer, not params.skip_special_tokens, prompt)
        self._strings = StopStrings(params.stop, params.include_stop_str_in_output)

    def add(self, token: int) -> Said:
        """Take one more token, after which the sequence may have ended."""
        self._count += 1
        may_stop = self._count >= self._params.min_tokens
        ended = may_stop and (token in self._ends or token in self._stops)
        piece, hit = "", None
        if self._text is not None and (not ended or self._params.include_stop_str_in_output):
            piece, hit = self._strings.add(self._text.add(token), may_stop)
        if hit is not None:
            return Said(piece, "stop", hit)
        if not ended and self._count < self._max_tokens:
            return Said(piece)
        rest, hit = self._rest()
        if hit is not None and not ended:
            return Said(piece + rest, "stop", hit)
        return Said(piece + rest, "stop" if ended else "length", token if ended and token not in self._ends else None)

    def _rest(self) -> tuple[str, str | None]:
        """What was kept back, when nothing more comes, and the string that ends in it."""
        if self._text is None:
            return "", None
        piece, hit = self._strings.add(self._text.flush())
        return piece + ("" if hit is not None else self._strings.flush()), hit
