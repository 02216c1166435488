"""A stepper without a model: its cache holds tokens, and what it says next depends on all that it reads there.

A block that was leaked, shared wrongly, overwritten or read too early changes the output; most such mistakes fail at
once, since each row of the cache also knows its position. `alone` says what a request gives when it is all there is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mgraph.runtime.serving.parameters import SamplingParams
from mgraph.runtime.serving.step import Batch, Pending, Sampled, Sampling

Logits = Callable[[Sequence[int]], NDArray[np.float64]]

EMPTY = -1


def hashed_logits(vocab_size: int, sharp: float = 3.0) -> Logits:
    """Logits f64[V] that depend on every token before them."""

    def logits(tokens: Sequence[int]) -> NDArray[np.float64]:
        state = 1469598103934665603
        for token in tokens:
            state = ((state ^ (token + 1)) * 1099511628211) % 2**64
        return np.random.Generator(np.random.PCG64(state)).normal(0, sharp, vocab_size)

    return logits


def _of_last(logits: Logits, windows: Sequence[int | None]) -> Logits:
    """Logits of what the widest window sees."""
    seen = 0 if None in windows else max(window or 0 for window in windows)
    return (lambda tokens: logits(tokens[-seen:])) if seen else logits


def spoken_logits(text: Sequence[int], vocab_size: int = 256) -> Logits:
    """Logits of a model that says these tokens, such as bytes, after any prompt, and begins again at their end."""

    def logits(tokens: Sequence[int]) -> NDArray[np.float64]:
        row = np.full(vocab_size, -5.0)
        row[text[(len(tokens) - tokens_of_prompt(tokens)) % len(text)]] = 5.0
        return row

    def tokens_of_prompt(tokens: Sequence[int]) -> int:
        """A prompt ends with the token 0 where this is used."""
        return len(tokens) - list(tokens)[::-1].index(0) if 0 in tokens else len(tokens)

    return logits


def log_softmax(row: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = row - row.max()
    scored: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return scored


def choose(row: NDArray[np.float64], sampling: Sampling, at: int) -> int:
    """A token by the parameters of row `at`, whose random number depends on seed and draw alone."""
    row = row.copy()
    if sampling.prompts is not None and sampling.outputs is not None:
        for token in {*sampling.prompts[at].tolist(), *sampling.outputs[at].tolist()}:
            row[token] = (
                row[token] / sampling.repetition[at] if row[token] > 0 else row[token] * sampling.repetition[at]
            )
        for token in sampling.outputs[at].tolist():
            row[token] -= sampling.frequency[at]
        for token in set(sampling.outputs[at].tolist()):
            row[token] -= sampling.presence[at]
    if sampling.bias is not None:
        row += sampling.bias[at]
    row = row[: sampling.padding_from]
    if sampling.temperature[at] == 0:
        return int(row.argmax())
    draw = np.random.Generator(np.random.PCG64([int(sampling.seeds[at]), int(sampling.draws[at])]))
    return int((row / sampling.temperature[at] + draw.gumbel(size=len(row))).argmax())


class FakeStepper:
    """See above. Each group of layers sees a window of the last tokens.

    `asynchronous` only delays the results and takes unknown tokens. `failing` are steps that fail, `refused` those that
    cannot be launched."""

    def __init__(
        self,
        *,
        num_blocks: int = 32,
        block_size: int = 4,
        max_length: int = 64,
        max_tokens: int = 16,
        max_requests: int = 4,
        vocab_size: int = 64,
        asynchronous: bool = False,
        logits: Logits | None = None,
        failing: Sequence[int] = (),
        refused: Sequence[int] = (),
        seconds: float = 0.0,
        windows: Sequence[int | None] = (None,),
    ) -> None:
        self.windows = windows
        self.num_blocks, self.block_size, self.max_length = num_blocks, block_size, max_length
        self.max_tokens, self.max_requests, self.vocab_size = max_tokens, max_requests, vocab_size
        self.asynchronous = asynchronous
        self.logits = _of_last(logits or hashed_logits(vocab_size), windows)
        self.failing, self.refused, self.seconds = set(failing), set(refused), seconds
        self.steps, self.computed = 0, 0
        self.cache = np.full((num_blocks * block_size, 3), EMPTY)  # token, position, group of layers
        self._last: list[int] = []

    @property
    def launches(self) -> dict[str, int]:
        return {"nothing is launched": self.steps}

    def run(self, batch: Batch, sampling: Sampling) -> Pending:
        self.steps += 1
        self.check(batch, sampling)
        if self.steps in self.refused:
            raise RuntimeError("no memory to launch it")
        tokens = np.array([t if t >= 0 else self._last[-1 - t] for t in batch.tokens.tolist()])
        for group, slots in enumerate(batch.slots):
            self.cache[slots] = np.stack([tokens, batch.positions, np.full_like(tokens, group)], 1)
        self.computed += len(tokens)
        owner = np.repeat(np.arange(len(batch.requests)), np.diff(batch.starts))
        outputs = sampling.outputs
        if outputs is not None:
            known = [np.array([t if t >= 0 else self._last[-1 - t] for t in o.tolist()], np.int64) for o in outputs]
            sampling = _with_outputs(sampling, known)
        chosen, scores, tops = [], [], []
        for at, row in enumerate(batch.rows.tolist()):
            logits = self.logits(self._read(batch, int(owner[row]), int(batch.positions[row])))
            scored = log_softmax(logits)
            token = int(sampling.targets[at])
            token = choose(logits, sampling, at) if token < 0 else token
            chosen.append(token)
            scores.append(scored[token])
            tops.append(np.argsort(-scored, kind="stable")[: sampling.alternatives])
        self._last = chosen
        top = np.array(tops, np.int64).reshape(len(chosen), sampling.alternatives)
        top_scores = np.array(
            [
                log_softmax(self.logits(self._read(batch, int(owner[r]), int(batch.positions[r]))))[t]
                for r, t in zip(batch.rows.tolist(), top, strict=True)
            ]
        ).reshape(top.shape)
        result = Sampled(np.array(chosen, np.int64), np.array(scores, np.float32), top, top_scores.astype(np.float32))
        return _Result(
            result, self.seconds, self.cache, np.concatenate(batch.slots) if self.steps in self.failing else None
        )

    def check(self, batch: Batch, sampling: Sampling) -> None:
        """What the contract says of a step's inputs."""
        count, requests = len(batch.tokens), len(batch.requests)
        assert 1 <= count <= self.max_tokens and 1 <= requests <= self.max_requests
        assert len(batch.positions) == count and len(batch.slots) == len(batch.blocks) == len(self.windows)
        assert batch.starts[0] == 0 and batch.starts[-1] == count and (np.diff(batch.starts) > 0).all()
        assert (np.diff(batch.rows) > 0).all() and len(batch.rows) == len(sampling.targets)
        rows = np.concatenate(batch.slots).tolist()
        assert len(set(rows)) == count * len(self.windows), "two tokens are written to one row of the cache"
        sizes = np.diff(batch.starts)
        assert (np.diff((sizes > 1).astype(int)) >= 0).all() or sizes.max() == 1, "single tokens come first"
        for r in range(requests):
            places = batch.positions[batch.starts[r] : batch.starts[r + 1]]
            assert (np.diff(places) == 1).all() and places[-1] + 1 == batch.lengths[r] <= self.max_length
            for window, slots, blocks in zip(self.windows, batch.slots, batch.blocks, strict=True):
                assert blocks.shape == (requests, -(-self.max_length // self.block_size))
                used = -(-int(batch.lengths[r]) // self.block_size)
                first = 0 if window is None else max(0, int(places[0]) + 1 - window) // self.block_size
                table = blocks[r, first:used].tolist()
                assert 0 not in table and len(set(table)) == used - first
                assert (blocks[r, :first] == 0).all() and (blocks[r, used:] == 0).all()
                rows = blocks[r, places // self.block_size] * self.block_size + places % self.block_size
                assert (rows == slots[batch.starts[r] : batch.starts[r + 1]]).all()

    def _read(self, batch: Batch, request: int, last: int) -> list[int]:
        """The tokens of a request up to position `last` that any layer sees, read through its blocks."""
        seen: list[int] = []
        for group, (window, blocks) in enumerate(zip(self.windows, batch.blocks, strict=True)):
            places = np.arange(0 if window is None else max(0, last + 1 - window), last + 1)
            rows = blocks[request, places // self.block_size] * self.block_size + places % self.block_size
            assert (self.cache[rows, 1] == places).all(), "a row of the cache holds another position"
            assert (self.cache[rows, 2] == group).all(), "a row of the cache holds keys of other layers"
            tokens = [int(token) for token in self.cache[rows, 0]]
            size = min(len(tokens), len(seen))
            assert not size or tokens[-size:] == seen[-size:], "groups of layers hold different tokens"
            seen = max(seen, tokens, key=len)
        return seen


class _Result:
    """Results that come later; of a step that failed an error, and rubbish where it wrote."""

    def __init__(
        self, sampled: Sampled, seconds: float, cache: NDArray[np.int64], failed: NDArray[np.int64] | None
    ) -> None:
        self._sampled, self._seconds, self._cache, self._failed = sampled, seconds, cache, failed

    def get(self) -> Sampled:
        if self._seconds:
            time.sleep(self._seconds)
        if self._failed is not None:
            self._cache[self._failed] = EMPTY
            raise RuntimeError("the device is on fire")
        return self._sampled


def _with_outputs(sampling: Sampling, outputs: Sequence[NDArray[np.int64]]) -> Sampling:
    return replace(sampling, outputs=tuple(outputs))


def alone(
    logits: Logits, prompt: Sequence[int], params: SamplingParams, count: int, seed: int = 0, ends: Sequence[int] = ()
) -> tuple[list[int], list[float]]:
    """Tokens and log-probabilities of a request that is the only one, by the definition: no cache, no batch."""
    tokens, scores = list(prompt), []
    for draw in range(count):
        row = logits(tokens)
        output = tokens[len(prompt) :]
        penalised = params.penalises
        sampling = Sampling(
            temperature=np.array([params.temperature], np.float32),
            top_k=np.zeros(1, np.int32),
            top_p=np.ones(1, np.float32),
            min_p=np.zeros(1, np.float32),
            seeds=np.array([seed], np.int64),
            draws=np.array([draw], np.int64),
            targets=np.array([-1]),
            repetition=np.array([params.repetition_penalty], np.float32),
            presence=np.array([params.presence_penalty], np.float32),
            frequency=np.array([params.frequency_penalty], np.float32),
            prompts=(np.array(prompt, np.int64),) if penalised else None,
            outputs=(np.array(output, np.int64),) if penalised else None,
            bias=_forbidden(params, output, len(row)),
            alternatives=0,
        )
        token = choose(row, sampling, 0)
        scores.append(float(log_softmax(row)[token]))
        tokens.append(token)
        if token in ends or text_alone(params, [*output, token])[1] is not None:
            break
    return tokens[len(prompt) :], scores


def _forbidden(params: SamplingParams, output: Sequence[int], vocab_size: int) -> NDArray[np.float32] | None:
    """The bias [1, V] after `output`. Each token is a byte; words leave one that is allowed."""
    if params.allowed_token_ids is None and not params.bad_words:
        return None
    bias = np.full((1, vocab_size), -np.inf, np.float32)
    bias[0, params.allowed_token_ids or range(vocab_size)] = 0
    for *before, last in (word.encode() for word in params.bad_words):
        if list(output[len(output) - len(before) :]) == before:
            bias[0, last] = -np.inf
    return bias


def text_alone(params: SamplingParams, tokens: Sequence[int]) -> tuple[str, str | None]:
    """The text of tokens, each of which is a byte, up to the stop string that is complete first, and that string. None
    is complete before the last of the least tokens."""
    text = bytes(tokens).decode("latin-1")
    stops = [(at, stop) for stop in params.stop for at in range(len(text)) if text.startswith(stop, at)]
    ends = [(at + len(stop), at, stop) for at, stop in stops if at + len(stop) >= params.min_tokens]
    if not ends:
        return text, None
    end, start, stop = min(ends)
    return text[: end if params.include_stop_str_in_output else start], stop
