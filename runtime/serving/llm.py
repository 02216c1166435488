"""A model for a program: `LLM(package, weights).generate(prompts)`, `stream`, `chat`. It needs no event loop.

Whoever waits for text makes the steps, for all that is under way: several threads, or generators that are read in turn,
share them. What the main thread asks of the engine is done by a thread beside it: handlers of signals, which raise
KeyboardInterrupt or what the caller's own handler does, run in the main thread, and never in the middle of a step.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgraph.runtime.chat import ChatTemplate, Message
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
        """On an engine that is there already."""
        made = cls.__new__(cls)
        made._set_up(engine, template)
        return made

    def _set_up(self, engine: Engine, template: ChatTemplate | None) -> None:
        self.engine, self.template = engine, template
        self._lock, self._turn = threading.Lock(), threading.Lock()
        self._beside = ThreadPoolExecutor(1, "LLM")
        self._beside.submit(int).result()  # its thread has begun: it would take a signal meanwhile
        self._arrived: dict[int, deque[Delta]] = {}
        self._dropped: deque[int] = deque()

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
        groups: list[int] = []

        def work(left: threading.Event) -> None:
            try:
                self._submit(inputs, all_params, groups)
                for group, output in zip(groups, gathered, strict=True):
                    while not output.finished and not left.is_set():
                        self._steps(group, left)
                        while self._arrived[group]:
                            output.add(self._arrived[group].popleft())
            finally:
                self._drop(groups)

        self._undisturbed(work)
        return [output.result() for output in gathered]

    def stream(self, prompt: Prompt, params: Params | None = None) -> Iterator[Delta]:
        """What comes of a prompt, as it comes. The request begins with the first delta that is asked for; closing or
        dropping the iterator ends it.

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

        def work(left: threading.Event) -> None:
            with self._alone():
                self.engine.scheduler.forget_all()

        self._undisturbed(work)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """The engine is this thread's; what was dropped before or meanwhile is ended."""
        with self._turn:  # else who has just had it would have it again before any other thread wakes
            self._lock.acquire()
        try:
            self._end_dropped()
            yield
        finally:
            self._lock.release()
            self._end_dropped_if_idle()

    def _undisturbed(self, work: Callable[[threading.Event], None]) -> None:
        """Do what takes the engine, once or again and again. What a signal raises meanwhile is raised when a step that
        was begun has ended, or by a second signal: `work` is told by the event that nobody waits for it any more."""
        left = threading.Event()
        if threading.current_thread() is not threading.main_thread():
            work(left)
            return
        try:
            self._beside.submit(work, left).result()
        except BaseException:
            left.set()
            self._beside.submit(int).result()  # comes after it, whether a signal found it begun or about to begin
            raise

    def _submit(self, inputs: Sequence[Input], params: Sequence[SamplingParams], groups: list[int]) -> None:
        """Begin requests, whose numbers are added to `groups`."""
        with self._alone():
            for given, one in zip(inputs, params, strict=True):
                groups.append(self.engine.submit(given.ids, one))
                self._arrived[groups[-1]] = deque()

    def _stream(self, given: Input, params: SamplingParams) -> Iterator[Delta]:
        groups: list[int] = []
        count = params.n

        def begin(left: threading.Event) -> None:
            self._submit([given], [params], groups)
            if left.is_set():
                self._drop(groups)  # a second signal did not wait for it

        try:
            self._undisturbed(begin)
            arrived = self._arrived[groups[0]]
            while count:
                if not arrived:
                    self._undisturbed(lambda left: self._steps(groups[0], left))
                delta = arrived.popleft()
                count -= delta.finish_reason is not None
                yield delta
        finally:
            self._drop(groups)

    def _steps(self, group: int, left: threading.Event) -> None:
        """Make steps until there is something of a request, unless another thread makes the one that gives it."""
        while not self._arrived[group] and not left.is_set():
            with self._alone():
                for delta in () if self._arrived[group] else self.engine.step():
                    if delta.group in self._arrived:
                        self._arrived[delta.group].append(delta)

    def _drop(self, groups: Sequence[int]) -> None:
        """Nobody waits for these any more. This never waits: a stream that is garbage is dropped wherever Python
        happens to collect it, also in the middle of a step and by the thread that makes it."""
        self._dropped.extend(groups)
        self._end_dropped_if_idle()

    def _end_dropped_if_idle(self) -> None:
        # Whoever holds the lock comes here after it is free again, so that nothing stays.
        while self._dropped and self._lock.acquire(blocking=False):
            try:
                self._end_dropped()
            finally:
                self._lock.release()

    def _end_dropped(self) -> None:
        """End what was dropped; the lock is held."""
        while self._dropped:
            group = self._dropped.popleft()
            self._arrived.pop(group, None)
            self.engine.abort(group)


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
