"""The loop that serves: plan a step, start it, take in the results of the one before.

With a stepper that runs asynchronously one step is under way while the host works: it is planned before the tokens of
the step before are known, which is possible since all else is. A sequence that turns out to have ended has then one
token too many under way, which is thrown away. With any other stepper each step's results are taken in at once.

One thread uses an engine. What goes wrong with a request ends that request; what goes wrong in a step ends those that
were in it and forgets what the cache held; an engine whose steps fail again and again is dead, and says so.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mgraph.errors import MgraphError
from mgraph.runtime.serving.batch import BatchBuilder, Row
from mgraph.runtime.serving.blocks import BlockPool
from mgraph.runtime.serving.constraints import Constraints
from mgraph.runtime.serving.continuation import Continuation
from mgraph.runtime.serving.parameters import ALL, SEEDS, RequestError, SamplingParams, check_ids, shown_id
from mgraph.runtime.serving.request import Request
from mgraph.runtime.serving.scheduler import Scheduler, Work
from mgraph.runtime.serving.step import Pending, Sampled, Stepper
from mgraph.runtime.serving.text import id_text, token_text
from mgraph.runtime.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot write."""

FAILURES = 3
"""Steps in a row that may fail before the engine counts as dead."""


class EngineDead(MgraphError):
    """The engine's steps fail, and it takes no more requests."""


@dataclass(frozen=True)
class Score:
    """The log-probability of a token, and the likeliest tokens in its place, likeliest first."""

    token: int
    text: str
    logprob: float
    top: tuple[tuple[int, str, float], ...]


@dataclass(frozen=True)
class Delta:
    """What a step brought for one continuation of a prompt. The last one has a `finish_reason`."""

    group: int
    """The number that `submit` gave."""
    index: int
    """Which of the n continuations."""
    text: str = ""
    tokens: tuple[int, ...] = ()
    scores: tuple[Score, ...] = ()
    """One a token, if log-probabilities were asked for."""
    prompt_scores: tuple[Score, ...] = ()
    """Of the prompt's tokens from the second on, if asked for; they may come in several parts, for index 0."""
    cached: int = 0
    """Tokens of the prompt that were found in the cache."""
    arrived: float = 0.0
    """When the request came, by `time.monotonic`."""
    queued: float = 0.0
    """Seconds that it then waited."""
    finish_reason: str | None = None
    """`stop`, `length`, `abort`, `error`."""
    stop_reason: int | str | None = None
    error: str | None = None


@dataclass(frozen=True)
class _UnderWay:
    works: Sequence[Work]
    rows: Sequence[Row]
    pending: Pending


@dataclass
class _Sequence:
    request: Request
    continuation: Continuation
    group: int
    index: int


class Engine:
    """Serves requests on one stepper."""

    def __init__(
        self,
        stepper: Stepper,
        tokenizer: Tokenizer | None = None,
        *,
        ends_of_text: Sequence[int] = (),
        seed: int = 0,
        prefix_cache: bool = True,
        max_requests: int = 0,
        max_tokens: int = 0,
        chunk: int = 0,
        padded: bool = True,
    ) -> None:
        """Bounds of 0 are the stepper's; `chunk` bounds the tokens of one prompt in a step (0: as many as fit). Tokens
        that the tokenizer lacks are never sampled, as they are padding of the vocabulary, unless it is not `padded`."""
        self.stepper, self.tokenizer = stepper, tokenizer
        self.ends_of_text = tuple(ends_of_text)
        pool = BlockPool(stepper.num_blocks, stepper.block_size, prefix_cache, stepper.windows)
        most = min(max_tokens or stepper.max_tokens, stepper.max_tokens)
        requests = min(max_requests or stepper.max_requests, stepper.max_requests, most)
        self.scheduler = Scheduler(pool, most, requests, chunk)
        self.failure: BaseException | None = None
        """Why the engine is dead."""
        self.driven = False
        """Whether a `Driver` makes its steps."""
        self.steps = 0
        self.shapes: Counter[tuple[int, int]] = Counter()
        """Steps by their numbers of tokens and requests."""
        self.prompted = 0
        """Tokens of prompts in all, of each request once."""
        self.generated = 0
        """Tokens in all."""
        # A model's vocabulary may be padded; what ends its texts is a token though the tokenizer may lack it.
        known = None if tokenizer is None else max([tokenizer.vocab_size, *(end + 1 for end in self.ends_of_text)])
        self._padding_from = None if not padded or known is None or known >= stepper.vocab_size else known
        sizes = stepper.block_size, stepper.max_length, stepper.vocab_size
        self._builder = BatchBuilder(*sizes, len(stepper.windows), self._padding_from)
        self.longest = min(stepper.max_length, pool.longest(stepper.max_length) + 1)
        """The most tokens of a prompt and its continuation together: what the model and the whole cache hold."""
        self._seeds = random.Random(seed)
        self._prefix_cache = prefix_cache
        self._groups: dict[int, dict[int, _Sequence]] = {}
        self._sequences: dict[int, _Sequence] = {}
        self._under_way: deque[_UnderWay] = deque()
        self._before: dict[int, int] = {}
        self._number = 0
        self._failures = 0

    @property
    def unfinished(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._sequences or self._under_way)

    @property
    def trouble(self) -> str | None:
        """Why nothing can be served any more, if nothing can."""
        if self.failure is None:
            return None
        return f"the engine has failed: {told(self.failure)}"

    def check_alive(self) -> None:
        """Raises `EngineDead` where nothing can be served any more."""
        if self.trouble is not None:
            raise EngineDead(self.trouble)

    def check(self, prompt: Sequence[int], params: SamplingParams, field: str = "prompt") -> int:
        """How many tokens may be generated after a prompt, which the person calls `field`. Raises `RequestError` for
        what cannot be served."""
        if not prompt:
            raise RequestError("the prompt is empty", field, "give at least one token")
        room = self.longest - len(prompt)
        if room < 1:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, and this model's maximum context length is {self.longest} with "
                "at least one generated token",
                field,
                "shorten it",
            )
        vocab_size = self.stepper.vocab_size
        wrong = next((token for token in prompt if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise RequestError(
                f"the prompt has token {shown_id(wrong)}, and the model has tokens 0 to {vocab_size - 1}", field
            )
        check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
        wanted = room if params.max_tokens is None else params.max_tokens
        if wanted > room:
            raise RequestError(
                f"this model's maximum context length is {self.longest} tokens, and {len(prompt) + wanted} were asked "
                f"for: {len(prompt)} in the prompt, {wanted} in the completion",
                "max_tokens",
                f"ask for at most {room}",
            )
        if params.min_tokens > wanted:
            raise RequestError(f"min_tokens {params.min_tokens} exceeds the {wanted} tokens that fit", "min_tokens")
        return wanted

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> int:
        """Take a request, which begins with the next step; gives its number. Raises `RequestError`, `EngineDead`."""
        self.check_alive()
        wanted = max(self.check(prompt, params), 1)  # where none is, the one that ends the prompt's steps is dropped
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self.ends_of_text))
        constraints = Constraints(
            params, self.stepper.vocab_size, ends, self._encode if self.tokenizer else None, self._padding_from
        )
        seed = self._seeds.randrange(SEEDS) if params.seed is None else params.seed
        tokens, group, leader = tuple(int(token) for token in prompt), self._number, None
        self.prompted += len(tokens)
        share = self._prefix_cache and len(tokens) > self.stepper.block_size
        for index in range(params.n):
            request = Request(
                self._number,
                tokens,
                params if index == 0 or params.prompt_logprobs is None else replace(params, prompt_logprobs=None),
                wanted,
                (seed + index * 0x9E3779B97F4A7C15) % SEEDS,
                leader if share else None,
                constraints.needs_known,
            )
            leader = leader or request
            self._number += 1
            continuation = Continuation(tokens, params, wanted, self.tokenizer, self.ends_of_text)
            sequence = _Sequence(request, continuation, group, index)
            self._groups.setdefault(group, {})[index] = sequence
            self._sequences[request.number] = sequence
            self._builder.add(request, constraints)
            self.scheduler.add(request)
        return group

    def abort(self, group: int) -> list[Delta]:
        """End what is left of a request, whose last deltas are given. Nothing, if it has ended."""
        left = list(self._groups.get(group, {}).values())
        return [self._end(sequence, _blank(sequence, finish_reason="abort")) for sequence in left]

    def has(self, group: int) -> bool:
        """Whether a request has not ended."""
        return group in self._groups

    def end_all(self, reason: str, error: str | None = None) -> list[Delta]:
        """End every request, and forget the steps under way."""
        self._under_way.clear()
        everything = list(self._sequences.values())
        return [self._end(s, _blank(s, finish_reason=reason, error=error)) for s in everything]

    def step(self) -> list[Delta]:
        """Do one step's worth of work, and give what has come of it; nothing may have yet."""
        works = self.scheduler.plan()
        deltas = self._start(works) if works else []
        if self._under_way and (len(self._under_way) > self.stepper.asynchronous or not works):
            deltas += self._take_in()
        elif not works and not deltas and self._sequences:
            deltas += self._fail(RuntimeError("requests wait, and none can be admitted"), self._sequences.values())
        return deltas if self.failure is None else deltas + self.end_all("error", told(self.failure))

    def _start(self, works: list[Work]) -> list[Delta]:
        self.steps += 1
        try:
            batch, sampling, rows = self._builder.build(works, self._before)
            self.shapes[len(batch.tokens), len(works)] += 1
            self._before = {row.request.number: at for at, row in enumerate(rows) if row.target < 0}
            pending = self.stepper.run(batch, sampling)
        except Exception as error:  # of the model, its kernels, the device: whatever it is, others go on
            before: list[Delta] = []
            while self._under_way:  # steps that did not fail, whose requests go on if they are not in this one
                before += self._take_in()
            return before + self._fail_step(error, works)
        self._under_way.append(_UnderWay(works, rows, pending))
        return []

    def _take_in(self) -> list[Delta]:
        step = self._under_way.popleft()
        try:
            sampled = step.pending.get()
            assert len(sampled.tokens) == len(step.rows), "a step gave another number of rows than was asked for"
        except Exception as error:
            return self._fail_step(error, step.works)
        self._failures = 0
        deltas: dict[int, Delta] = {}
        for at, row in enumerate(step.rows):
            sequence = self._sequences.get(row.request.number)
            if sequence is None:
                continue  # it has ended while this was under way
            try:
                self._take(sequence, row, at, sampled, deltas)
            except Exception as error:
                deltas[row.request.number] = self._end(sequence, _failed(sequence, error))
        return list(deltas.values())

    def _take(self, sequence: _Sequence, row: Row, at: int, sampled: Sampled, deltas: dict[int, Delta]) -> None:
        """Add what one row gave to the delta of its sequence."""
        request, params = sequence.request, sequence.request.params
        old = deltas.get(request.number)
        of_prompt = () if old is None else old.prompt_scores
        if row.target >= 0:
            score = self._score(sampled, at, params.prompt_logprobs or 0)
            deltas[request.number] = _blank(sequence, prompt_scores=(*of_prompt, score))
            return
        request.in_flight -= 1
        if params.max_tokens == 0:
            scored = _blank(sequence, prompt_scores=of_prompt, finish_reason="length")
            deltas[request.number] = self._end(sequence, scored)
            return
        token = int(sampled.tokens[at])
        request.output.append(token)
        self.generated += 1
        said = sequence.continuation.add(token)
        delta = _blank(
            sequence,
            text=said.text,
            tokens=(token,),
            scores=() if params.logprobs is None else (self._score(sampled, at, params.logprobs),),
            prompt_scores=of_prompt,
            finish_reason=said.finish_reason,
            stop_reason=said.stop_reason,
        )
        deltas[request.number] = delta
        if said.finish_reason is not None:
            self._end(sequence, delta)

    def _score(self, sampled: Sampled, at: int, count: int) -> Score:
        token = int(sampled.tokens[at])
        part = slice(None) if count == ALL else slice(count)
        pairs = zip(sampled.top_tokens[at][part].tolist(), sampled.top_logprobs[at][part].tolist(), strict=True)
        top = tuple((t, self._text(t), _finite(p)) for t, p in pairs)
        return Score(token, self._text(token), _finite(float(sampled.logprobs[at])), top)

    def _end(self, sequence: _Sequence, delta: Delta) -> Delta:
        """A sequence ends with this delta: nothing of it stays."""
        request = sequence.request
        del self._sequences[request.number]
        group = self._groups[sequence.group]
        del group[sequence.index]
        if not group:
            del self._groups[sequence.group]
        try:
            self.scheduler.end(request)
            self._builder.drop(request)
        except Exception as error:  # a mistake of ours: nobody knows any more whose blocks are whose
            self.failure = self.failure or error
        return delta

    def _fail_step(self, error: Exception, works: Sequence[Work]) -> list[Delta]:
        """A step failed: with it go those after it, which build on it."""
        lost = [*works, *(work for step in self._under_way for work in step.works)]
        self._under_way.clear()
        self._failures += 1
        sequences = {work.request.number: self._sequences.get(work.request.number) for work in lost}
        deltas = self._fail(error, [s for s in sequences.values() if s is not None])
        self.scheduler.forget_all()
        if self._failures >= FAILURES:
            self.failure = error
        return deltas

    def _fail(self, error: Exception, sequences: Iterable[_Sequence]) -> list[Delta]:
        return [self._end(s, _failed(s, error)) for s in list(sequences)]

    def _encode(self, text: str) -> list[int]:
        assert self.tokenizer is not None
        return [int(token) for token in self.tokenizer.encode(text).tolist()]

    def _text(self, token: int) -> str:
        return id_text(token) if self.tokenizer is None else token_text(self.tokenizer, token)


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB) if np.isfinite(logprob) else LEAST_LOGPROB


def told(error: BaseException) -> str:
    """An error as requests are told of it."""
    return error.message if isinstance(error, MgraphError) else f"{type(error).__name__}: {error}"


def _failed(sequence: _Sequence, error: Exception) -> Delta:
    return _blank(sequence, finish_reason="error", error=told(error))


def _blank(sequence: _Sequence, **more: Any) -> Delta:
    """A delta of a sequence that says nothing yet."""
    request = sequence.request
    return Delta(
        sequence.group,
        sequence.index,
        cached=request.cached,
        arrived=request.arrived,
        queued=request.queued or 0.0,
        **more,
    )
