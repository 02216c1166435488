"""What a request asks for, with the ranges that people know from other engines; each wrong value is named."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any

from mgraph.errors import MgraphError, did_you_mean
from mgraph.runtime.serving.step import MOST_ALTERNATIVES

GREEDY_BELOW = 1e-5
"""Temperatures below it mean the likeliest token."""

LEAST_TEMPERATURE = 0.01
"""Temperatures between the two are raised to it: logits divided by less could overflow."""

ALL = -1
"""As a number of alternatives: the whole vocabulary."""

MOST_CHOICES = 128
MOST_STOPS = 64
MOST_CHARACTERS = 1024
"""Of a stop string or a bad word."""
BIAS_LIMIT = 100.0
SEEDS = 2**63


class RequestError(MgraphError, ValueError):
    """A request asks for what cannot be. `param` is the field that is wrong, where it is one. Programs that were
    written for other engines expect a ValueError."""

    def __init__(self, message: str, param: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, param, hint)

    @property
    def param(self) -> str | None:
        """The field, as the one who asks writes it."""
        return self.where


@dataclass(frozen=True)
class SamplingParams:
    """How a prompt is continued. Raises `RequestError` for a value that is out of its range.

    Logits are changed by the penalties, `logit_bias`, `allowed_token_ids` and `bad_words`, divided by the temperature,
    then cut by `top_k`, `top_p` and `min_p`, in this order.
    """

    n: int = 1
    """How many continuations of the prompt."""
    temperature: float = 1.0
    """0, or below 1e-5: the likeliest token each time."""
    top_k: int = 0
    """Draw from the k likeliest tokens; 0 or -1: from all."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that have this probability together."""
    min_p: float = 0.0
    """Leave out tokens less probable than this part of the likeliest one's probability."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    """The same seed gives the same continuation, whatever else is served (None or -1: the engine's own)."""
    max_tokens: int | None = 16
    """None: as many as the model's length and the cache allow; 0: none, the prompt is only scored."""
    min_tokens: int = 0
    """No end by a stop string, a stop token or the end of text before this many tokens."""
    stop: Sequence[str] | str = ()
    """Texts that end the continuation; they are no part of it unless `include_stop_str_in_output`."""
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    """Go on after the tokenizer's end of text."""
    logprobs: int | None = None
    """Give the log-probability of each token, and those of this many of the likeliest; -1: of the whole vocabulary."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt; the first has none."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these tokens; beyond -100 and 100 they count as these."""
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    """Texts whose tokens must not come in this order."""
    detokenize: bool = True
    """False: no text is made, only tokens; stop strings are then refused."""
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        """Check and normalise: tuples for lists, None for a seed of -1, 0 for a top_k of -1."""
        _check_numbers(self)
        _set(self, "stop", _texts("stop", self.stop, MOST_STOPS))
        _set(self, "bad_words", _texts("bad_words", self.bad_words, MOST_STOPS))
        _set(self, "stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            _set(self, "allowed_token_ids", _ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise RequestError("allowed_token_ids is empty: no token could come", "allowed_token_ids")
        if self.logit_bias is not None:
            _set(self, "logit_bias", _bias(self.logit_bias))
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need the text, and detokenize is false", "stop")
        if self.greedy:
            _set(self, "temperature", 0.0)
            if self.n > 1:
                raise RequestError(
                    f"n is {self.n}, and with temperature 0 all continuations would be the same",
                    "n",
                    "give a temperature, or n = 1",
                )
        elif self.temperature < LEAST_TEMPERATURE:
            _set(self, "temperature", LEAST_TEMPERATURE)
        _set(self, "top_k", max(self.top_k, 0))
        if self.seed == -1:
            _set(self, "seed", None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}", "min_tokens")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken each time."""
        return self.temperature < GREEDY_BELOW

    @property
    def penalises(self) -> bool:
        """Whether tokens that were there before are made less likely."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    def with_max_tokens(self, count: int) -> SamplingParams:
        """The same with another `max_tokens`."""
        return replace(self, max_tokens=count)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Of a dict; an unknown name is a `RequestError` with the nearest that there is."""
        known = [item.name for item in fields(cls)]
        for name in values:
            if not isinstance(name, str):
                raise RequestError(f"names of sampling parameters are texts, not {name!r}", "params")
            if name not in known:
                raise RequestError(f"there is no sampling parameter '{name}'", name, did_you_mean(name, known))
        return cls(**values)


_RANGES: Mapping[str, tuple[type, float, float, bool]] = {
    "n": (int, 1, MOST_CHOICES, False),
    "temperature": (float, 0, 1000, False),
    "top_k": (int, -1, 2**31 - 1, False),
    "top_p": (float, 0, 1, True),
    "min_p": (float, 0, 1, False),
    "presence_penalty": (float, -2, 2, False),
    "frequency_penalty": (float, -2, 2, False),
    "repetition_penalty": (float, 0.01, 100, False),
    "seed": (int, -1, SEEDS - 1, False),
    "max_tokens": (int, 0, 2**31 - 1, False),
    "min_tokens": (int, 0, 2**31 - 1, False),
    "logprobs": (int, ALL, MOST_ALTERNATIVES, False),
    "prompt_logprobs": (int, ALL, MOST_ALTERNATIVES, False),
}
"""Field -> its type, least and greatest value, and whether the least itself is left out. None overflows in f32."""

_OPTIONAL = ("seed", "max_tokens", "logprobs", "prompt_logprobs")
_FLAGS = ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens")


def _set(params: SamplingParams, name: str, value: Any) -> None:
    object.__setattr__(params, name, value)  # frozen for others


def _check_numbers(params: SamplingParams) -> None:
    for name, (kind, low, high, open_below) in _RANGES.items():
        value = getattr(params, name)
        if value is None and name in _OPTIONAL:
            continue
        if isinstance(value, bool) or not isinstance(value, Real if kind is float else Integral):
            raise RequestError(f"{name} must be {'a number' if kind is float else 'an integer'}, not {value!r}", name)
        if not isinstance(value, int | float):  # as some of numpy's are
            value = kind(value)
            _set(params, name, value)
        if not low <= value <= high or (open_below and value == low) or not math.isfinite(value):
            least = f"greater than {low:g}" if open_below else f"at least {low:g}"
            most = "" if high == math.inf or high >= 2**31 - 1 else f" and at most {high:g}"
            raise RequestError(f"{name} is {_shown(value)}: it must be {least}{most}", name)
    for name in _FLAGS:
        if not isinstance(getattr(params, name), bool):
            raise RequestError(f"{name} must be true or false, not {getattr(params, name)!r}", name)


def _shown(value: float) -> str:
    try:
        return repr(value)
    except ValueError:  # more digits than Python writes
        return "a number of thousands of digits"


def _texts(name: str, value: Any, most: int) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise RequestError(f"{name} must be a text or a list of texts, not {value!r}", name)
    if "" in texts:
        raise RequestError(f"{name} holds an empty text", name, "leave it out")
    if len(texts) > most:
        raise RequestError(f"{name} has {len(texts)} texts, and at most {most} are allowed", name)
    if max(map(len, texts), default=0) > MOST_CHARACTERS:
        problem = f"{name} has a text of {max(map(len, texts))} characters, and at most {MOST_CHARACTERS} are allowed"
        raise RequestError(problem, name)
    return tuple(texts)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if (
        isinstance(value, str)
        or not isinstance(value, Sequence)
        or not all(is_token(item) and item >= 0 for item in value)
    ):
        raise RequestError(f"{name} must be a list of token ids, not {value!r}", name)
    return tuple(int(item) for item in value)


def _key(value: Any) -> int:
    """A token id, or its digits. Raises ValueError for others that `int` takes: a fraction, blanks, other scripts."""
    if not is_token(value) and not (isinstance(value, str) and re.fullmatch("-?[0-9]{1,18}", value)):
        raise ValueError(f"{value!r} is no token id")
    return int(value)


def is_token(value: Any) -> bool:
    """Whether a value is an integer, as a token id must be."""
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def check_ids(name: str, tokens: Iterable[int], vocab_size: int) -> None:
    """Raise RequestError for a token of the parameter `name` that the model does not have."""
    for token in tokens:
        if token >= vocab_size:
            raise RequestError(f"{name} has token {shown_id(token)}, and the model has {vocab_size}", name)


def shown_id(token: int) -> str:
    """A token id in a message, however large: Python writes out no number of thousands of digits."""
    return str(token) if token.bit_length() < 64 else f"a number of {token.bit_length()} bits"


def _bias(value: Any) -> dict[int, float]:
    """Keys come as texts through JSON."""
    try:
        bias = {_key(token): float(added) for token, added in value.items()}
    except (AttributeError, OverflowError, TypeError, ValueError) as error:
        raise RequestError("logit_bias must map token ids to numbers", "logit_bias") from error
    if any(token < 0 or math.isnan(added) for token, added in bias.items()):
        raise RequestError("logit_bias has a negative token id or a value that is no number", "logit_bias")
    return {token: min(max(added, -BIAS_LIMIT), BIAS_LIMIT) for token, added in bias.items()}
