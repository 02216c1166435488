"""A model for a program: `LLM(package, weights).generate(prompts)`, `stream`, `chat`. It needs no event loop.

A driver makes the steps, for all that is under way: several threads, or streams that are read in turn, share them.
Handlers of signals, which raise KeyboardInterrupt or what the caller's own handler does, end the call that waits, and
never meet a step half done; they may call the `LLM` themselves.
"""

from __future__ import annotations

import queue
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgraph.runtime.chat import ChatTemplate, Message
from mgraph.runtime.serving.driver import Driver, Taker
from mgraph.runtime.serving.engine import Delta, Engine, Score
from mgraph.runtime.serving.opening import open_engine
from mgraph.runtime.serving.parameters import RequestError, SamplingParams
from mgraph.runtime.serving.prompts import Input, Prompt, read_chat, read_prompt, separate
from mgraph.runtime.tokenizer import Tokenizer

Params = SamplingParams | Mapping[str, Any]
"""Parameters, or a dict of their fields."""


@dataclass(frozen=True)
class Completion:
    """One continuation of a prompt."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    """All that were generated, one that ended it included."""
    cumulative_logprob: float | None
    logprobs: tuple[Score, ...] | None
    finish_reason: str | None
    """`stop`, `length`, `abort`, `error`; None while it goes on."""
    stop_reason: int | str | None
    """The token or string of the request that ended it; None for the end of text."""
    error: str | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its continuations."""

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[Score | None, ...] | None
    """One a token of the prompt, None for the first; or None as a whole, where they were not asked for."""
    outputs: tuple[Completion, ...]
    finished: bool
    cached_tokens: int = 0
    """Tokens of the prompt that were found in the cache."""


class LLM:
    """A serve package with its weights. All calls may be made from any thread, with or without a running event loop."""

    def __init__(self, package: Path | str, weights: Path | str | None = None, **settings: Any) -> None:
        """`settings` are the fields of `opening.Settings`: `random_init`, `tokenizer`, `num_blocks`, `device`, …

        Raises OptionError without weights, unless `random_init` says that noise is wanted.
        """
        self._set_up(*open_engine(package, weights, **settings))

    @classmethod
    def over(cls, engine: Engine, template: ChatTemplate | None = None) -> LLM:
        """On an engine that is there already. Raises OptionError if another LLM or a server has it."""
        made = cls.__new__(cls)
        made._set_up(engine, template)
        return made

    def _set_up(self, engine: Engine, template: ChatTemplate | None) -> None:
        self.engine, self.template = engine, template
        self._driver = Driver(engine)  # which knows nothing of the LLM, and is stopped when nobody holds that any more
        weakref.finalize(self, self._driver.stop).atexit = False
        self._driver.start()

    @property
    def tokenizer(self) -> Tokenizer | None:
        """What makes tokens of texts."""
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts; the results are in their order. `params` is for all of them, or a list, one for each.

        Raises RequestError, before anything is begun, if one of them cannot be served.
        """
        return self._generate([read_prompt(self.engine, prompt) for prompt in separate(prompts)], params)

    def _generate(self, inputs: Sequence[Input], params: Params | Sequence[Params] | None) -> list[RequestOutput]:
        all_params = _params(params, len(inputs))
        for given, one in zip(inputs, all_params, strict=True):
            self.engine.check(given.ids, one, given.field)
        gathered = [Gathering(g.text, g.ids, p) for g, p in zip(inputs, all_params, strict=True)]
        finished: queue.SimpleQueue[Gathering] = queue.SimpleQueue()

        def gathers(output: Gathering) -> Taker:
            def take(delta: Delta) -> None:
                output.add(delta)
                if delta.finish_reason is not None and output.finished:
                    finished.put(output)

            return take

        with self._begun(inputs, all_params, [gathers(output) for output in gathered]):
            for _ in gathered:
                self._driver.wait_for(finished)
        return [output.result() for output in gathered]

    def stream(self, prompt: Prompt, params: Params | None = None) -> Iterator[Delta]:
        """What comes of a prompt, as it comes. The request begins with the first delta that is asked for, and goes on
        whether or not the next one is; closing or dropping the iterator ends it.

        The texts of all deltas with the same `index`, put together, are the text that `generate` gives. Raises
        RequestError, at the latest with the first delta, if the request cannot be served.
        """
        (one,) = _params(params, 1)
        given = read_prompt(self.engine, prompt)
        self.engine.check(given.ids, one)
        return self._stream(given, one)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params | Sequence[Params] | None = None,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, as `generate`. What a message may hold is told in `prompts`; the last
        are more variables of the chat template."""
        several = isinstance(messages, list | tuple) and bool(messages) and not isinstance(messages[0], Mapping)
        conversations = messages if several else [messages]
        given = (self.engine, self.template)
        return self._generate([read_chat(*given, each, tools, chat_template_kwargs) for each in conversations], params)

    def reset_prefix_cache(self) -> None:
        """Forget what the cache holds of earlier prompts, as after a change of the weights."""
        self._driver.ask(self.engine.scheduler.forget_all)

    def _stream(self, given: Input, params: SamplingParams) -> Iterator[Delta]:
        arrived: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        with self._begun([given], [params], [arrived.put]):
            left = params.n
            while left:
                delta = self._driver.wait_for(arrived)
                left -= delta.finish_reason is not None
                yield delta

    @contextmanager
    def _begun(
        self, inputs: Sequence[Input], params: Sequence[SamplingParams], takers: Sequence[Taker]
    ) -> Iterator[None]:
        """Requests that end with the block, all begun in one step. Raises RequestError, EngineDead."""
        driver, groups = self._driver, list[int]()

        def begin() -> None:
            for given, one, taker in zip(inputs, params, takers, strict=True):
                groups.append(driver.submit(given.ids, one, taker))

        def end() -> None:
            for group in groups:
                driver.abort(group)

        try:
            driver.ask(begin)
            yield
        finally:
            driver.do(end)  # comes after `begin`, also where nobody waited for that


class Gathering:
    """The deltas of a request, put together."""

    def __init__(self, prompt: str | None, ids: Sequence[int], params: SamplingParams) -> None:
        self._prompt, self._ids, self._params = prompt, tuple(ids), params
        self._deltas: list[list[Delta]] = [[] for _ in range(params.n)]

    @property
    def finished(self) -> bool:
        """Whether all continuations have ended."""
        return all(deltas and deltas[-1].finish_reason is not None for deltas in self._deltas)

    def add(self, delta: Delta) -> None:
        """One more."""
        self._deltas[delta.index].append(delta)

    def result(self) -> RequestOutput:
        """What there is so far."""
        prompt_scores = None
        if self._params.prompt_logprobs is not None:
            prompt_scores = (None, *(score for delta in self._deltas[0] for score in delta.prompt_scores))
        outputs = tuple(self._completion(index, deltas) for index, deltas in enumerate(self._deltas))
        cached = max((delta.cached for delta in self._deltas[0]), default=0)
        return RequestOutput(self._prompt, self._ids, prompt_scores, outputs, self.finished, cached)

    def _completion(self, index: int, deltas: Sequence[Delta]) -> Completion:
        scores = tuple(score for delta in deltas for score in delta.scores)
        wanted = self._params.logprobs is not None
        last = deltas[-1] if deltas else Delta(0, index)
        return Completion(
            index=index,
            text="".join(delta.text for delta in deltas),
            token_ids=tuple(token for delta in deltas for token in delta.tokens),
            cumulative_logprob=sum(score.logprob for score in scores) if wanted else None,
            logprobs=scores if wanted else None,
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            error=last.error,
        )


def _params(params: Any, count: int) -> list[SamplingParams]:
    if isinstance(params, Sequence) and not isinstance(params, str):
        if len(params) != count:
            raise RequestError(
                f"{len(params)} sampling parameters for {count} prompts", "params", "give one, or one each"
            )
        return [_one_params(item) for item in params]
    return [_one_params(params)] * count


def _one_params(params: Any) -> SamplingParams:
    if params is None:
        return SamplingParams()
    if isinstance(params, SamplingParams):
        return params
    if not isinstance(params, Mapping):
        raise RequestError(
            f"sampling parameters must be SamplingParams or a dict of its fields, not {params!r}",
            "params",
            "several prompts are one list: generate([first, second])",
        )
    return SamplingParams.of(params)
