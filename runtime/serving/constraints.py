"""What a request forbids or favours among the next tokens, as numbers that are added to the logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from mgraph.runtime.serving.parameters import RequestError, SamplingParams, check_ids
from mgraph.runtime.serving.step import F32


class Constraints:
    """The bias of one request, step by step. Raises `RequestError` for tokens that the model does not have."""

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        ends: Iterable[int] = (),
        encode: Callable[[str], Sequence[int]] | None = None,
        padding_from: int | None = None,
    ) -> None:
        """`ends` are the tokens that end the text; `encode` is needed where there are bad words; tokens from
        `padding_from` on are never sampled."""
        self._padding_from = padding_from
        self._vocab_size = vocab_size
        self._early = tuple(sorted(ends))
        self._min_tokens = params.min_tokens
        words = _bad_words(params, encode)
        single = [word[0] for word in words if len(word) == 1]
        self._sequences = [word for word in words if len(word) > 1]
        self._always = self._constant(params, single)
        if (
            params.min_tokens
            and self._early
            and not np.isfinite(self._without(self._early)[: self._padding_from]).any()
        ):
            raise RequestError("min_tokens forbids the only tokens that are allowed: they end the text", "min_tokens")

    @property
    def needs_known(self) -> bool:
        """Whether the bias depends on the tokens before."""
        return bool(self._sequences)

    def bias(self, sampled: int, tail: Sequence[int]) -> F32 | None:
        """f32[V] for the next token, or None: nothing to add. `sampled` tokens of output come before it.

        `tail` are the tokens before, as far as they are known; they are looked at only where `needs_known`. Where bad
        words of several tokens would leave no token, they give way.
        """
        early = self._early if sampled < self._min_tokens else ()
        words = [last for *before, last in self._sequences if list(tail[len(tail) - len(before) :]) == before]
        if words:
            row = self._without((*early, *words))
            if np.isfinite(row[: self._padding_from]).any():
                return row
        return self._without(early) if early else self._always

    def _without(self, forbidden: Sequence[int]) -> F32:
        """The bias of all steps, and these forbidden, too."""
        row = np.zeros(self._vocab_size, np.float32) if self._always is None else self._always.copy()
        row[list(forbidden)] = -np.inf
        return row

    def _constant(self, params: SamplingParams, forbidden: Sequence[int]) -> F32 | None:
        if params.allowed_token_ids is None and not params.logit_bias and not forbidden:
            return None
        row = np.zeros(self._vocab_size, np.float32)
        if params.allowed_token_ids is not None:
            check_ids("allowed_token_ids", params.allowed_token_ids, self._vocab_size)
            row[:] = -np.inf
            row[list(params.allowed_token_ids)] = 0
        if params.logit_bias:
            check_ids("logit_bias", params.logit_bias, self._vocab_size)
            for token, added in params.logit_bias.items():
                row[token] += added
        row[list(forbidden)] = -np.inf
        if not np.isfinite(row[: self._padding_from]).any():
            raise RequestError("allowed_token_ids, logit_bias and bad_words together leave no token", "bad_words")
        return row


def _bad_words(params: SamplingParams, encode: Callable[[str], Sequence[int]] | None) -> list[tuple[int, ...]]:
    """Each word as it stands at the beginning and after a blank."""
    if not params.bad_words:
        return []
    if encode is None:
        raise RequestError("bad_words need a tokenizer", "bad_words", "give logit_bias")
    found = {tuple(encode(text)) for word in params.bad_words for text in (word, " " + word.lstrip())}
    return sorted(word for word in found if word)
