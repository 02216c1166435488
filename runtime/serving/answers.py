"""The bodies of HTTP responses: whole, or in the chunks of a stream."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mgraph.runtime.serving.engine import Delta, Score
from mgraph.runtime.serving.llm import RequestOutput
from mgraph.runtime.serving.parameters import SamplingParams
from mgraph.runtime.serving.text import Starts, id_text, token_bytes
from mgraph.runtime.tokenizer import Tokenizer


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error as clients read it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def event(data: Mapping[str, Any] | str) -> bytes:
    """One event of a stream."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


def usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Numbers of tokens."""
    asked = sum(len(output.prompt_token_ids) for output in outputs)
    made = sum(len(one.token_ids) for output in outputs for one in output.outputs)
    return _usage(asked, made, sum(output.cached_tokens for output in outputs))


def _usage(asked: int, made: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": asked,
        "completion_tokens": made,
        "total_tokens": asked + made,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


@dataclass
class Heading:
    """What every chunk of a response repeats."""

    model: str
    chat: bool
    wants_usage: bool = False
    """Whether the last chunk says how many tokens there were; those before say then that they do not."""
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        """Draw an id."""
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"

    def body(self, choices: list[dict[str, Any]], chunk: bool, **more: Any) -> dict[str, Any]:
        """A whole response, or a chunk."""
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else "text_completion"
        made = {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}
        return {**made, **({"usage": None} if chunk and self.wants_usage else {}), **more}


@dataclass(frozen=True)
class Echo:
    """The text of a prompt as it is given back, and the characters that its tokens begin at. A character that it begins
    and does not end is left to the completion."""

    text: str = ""
    starts: Sequence[int] = ()

    @classmethod
    def of(cls, tokenizer: Tokenizer | None, prompt: str | Sequence[int]) -> Echo:
        """Of a text, as it came, though a tokenizer may change it and put tokens before it; or of token ids."""
        if tokenizer is None:
            return cls("", [0] * len(prompt))
        if not isinstance(prompt, str):
            known = [token for token in prompt if token < tokenizer.vocab_size]
            text, starts = tokenizer.decode(known, special=True), Starts(tokenizer, special=True)
            begins = [starts.add(token) for token in prompt]
            return cls(text[: len(text) - starts.begun], begins)
        (encoded,) = tokenizer.encode_batch([prompt])
        # A tokenizer may count a blank that a token begins with to no token; here each begins where the last one ends.
        ends = [0, *encoded.ends.tolist()]
        begins = [min(start, end) for start, end in zip(encoded.starts.tolist(), ends, strict=False)]
        return cls(prompt, [*[0] * len(tokenizer.prefix), *begins])


class Completions:
    """Choices of /v1/completions. One object makes the chunks of a stream, since it remembers how long each text is."""

    def __init__(
        self, tokenizer: Tokenizer | None, prompts: Sequence[Sequence[int]], params: SamplingParams, echo: bool
    ) -> None:
        """Of prompts, in tokens, each of which is continued `params.n` times."""
        self._tokenizer, self._prompts, self._params = tokenizer, prompts, params
        self.echo, self.logprobs = echo, params.logprobs is not None
        self._starts: dict[int, Starts] = {}

    def whole(self, outputs: Sequence[RequestOutput], prompts: Sequence[Echo]) -> list[dict[str, Any]]:
        """The choices of prompts, which they begin with if they are to."""
        choices = []
        for at, (output, prompt) in enumerate(zip(outputs, prompts, strict=True)):
            for one in output.outputs:
                index = at * self._params.n + one.index
                text, scores = one.text, tuple(one.logprobs or ())
                first: tuple[Score | None, ...] = self.of_prompt(output) if self.echo else ()
                choices.append(
                    {
                        "index": index,
                        "text": prompt.text + text if self.echo else text,
                        "logprobs": self.lists(index, (*first, *scores), prompt),
                        "finish_reason": one.finish_reason,
                        "stop_reason": one.stop_reason,
                    }
                )
        return choices

    def of_prompt(self, output: RequestOutput) -> tuple[Score | None, ...]:
        """Scores of the prompt's tokens, the first of which has a text and nothing else."""
        if not self.logprobs or output.prompt_logprobs is None:
            return ()
        return (self.first(output.prompt_token_ids[0]), *output.prompt_logprobs[1:])

    def first(self, token: int) -> Score:
        """The first token of a prompt: nothing comes before it that could make it likely."""
        text = id_text(token) if self._tokenizer is None else self._tokenizer.decode([token], special=True)
        return Score(token, text, float("nan"), ())

    def begin(self, index: int, prompt: Echo, scores: Sequence[Score | None]) -> dict[str, Any]:
        """A choice of a chunk that gives the prompt."""
        return self._chunk(index, prompt.text, self.lists(index, scores, prompt) if scores else None)

    def chunk(self, index: int, text: str, scores: Sequence[Score | None], delta: Delta) -> dict[str, Any]:
        """A choice of a chunk."""
        return self._chunk(index, text, self.lists(index, scores) if scores else None, delta)

    def _chunk(self, index: int, text: str, lists: dict[str, Any] | None, delta: Delta | None = None) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": lists,
            "finish_reason": None if delta is None else delta.finish_reason,
            "stop_reason": None if delta is None else delta.stop_reason,
        }

    def lists(self, index: int, scores: Sequence[Score | None], prompt: Echo | None = None) -> dict[str, Any] | None:
        """Log-probabilities in lists of the same length; nan, the first token of a prompt, is null.

        The first of all scores of a choice are those of the prompt, if it is to begin with that. Offsets are characters
        of the text; those of tokens that stop strings cut off lie where they would be.
        """
        if not self.logprobs:
            return None
        echo = prompt if self.echo and prompt is not None else Echo()
        if index not in self._starts:
            before, special = self._prompts[index // self._params.n], not self._params.skip_special_tokens
            self._starts[index] = Starts(self._tokenizer, special, before, len(echo.text))
        starts = self._starts[index]
        tokens, values, tops, offsets = [], [], [], []
        for at, score in enumerate(scores):
            assert score is not None
            known = score.logprob == score.logprob
            tokens.append(score.text)
            values.append(score.logprob if known else None)
            tops.append(_by_text(score) if known else None)
            offsets.append(echo.starts[at] if at < len(echo.starts) else starts.add(score.token))
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def _by_text(score: Score) -> dict[str, float]:
    """The log-probabilities of a token and its alternatives; of two with the same text the second goes by its id."""
    found = {score.text: score.logprob}
    for token, text, logprob in score.top:
        if token != score.token:
            found[id_text(token) if text in found else text] = logprob
    return found


class Chats:
    """Choices of /v1/chat/completions."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def whole(self, output: RequestOutput) -> list[dict[str, Any]]:
        """All answers to one conversation."""
        return [
            {
                "index": one.index,
                "message": {"role": "assistant", "content": one.text, "refusal": None},
                "logprobs": None if one.logprobs is None else self.content(one.logprobs),
                "finish_reason": one.finish_reason,
                "stop_reason": one.stop_reason,
            }
            for one in output.outputs
        ]

    def chunk(self, index: int, said: Mapping[str, str], delta: Delta | None = None) -> dict[str, Any]:
        """A choice of a chunk; the first of each has the role."""
        scores = () if delta is None else delta.scores
        return {
            "index": index,
            "delta": dict(said),
            "logprobs": self.content(scores) if scores else None,
            "finish_reason": None if delta is None else delta.finish_reason,
            "stop_reason": None if delta is None else delta.stop_reason,
        }

    def content(self, scores: Sequence[Score]) -> dict[str, Any]:
        """Log-probabilities of tokens."""
        return {"content": [self._score(score) for score in scores], "refusal": None}

    def _score(self, score: Score) -> dict[str, Any]:
        top = [self._token(*item) for item in score.top]
        return {**self._token(score.token, score.text, score.logprob), "top_logprobs": top}

    def _token(self, token: int, text: str, logprob: float) -> dict[str, Any]:
        raw = [] if self._tokenizer is None else token_bytes(self._tokenizer, token)
        return {"token": text, "logprob": logprob, "bytes": raw}
