"""Replays steps of a serve package as CUDA graphs: one for each bucket of tokens and requests, made when it is needed.

A step is written into the fixed inputs of the smallest bucket of its kind that holds it, by one copy, and padded: more
tokens, which belong to no request and write to block 0; more requests, which have no tokens; more rows of logits, which
are those of token 0 again. The first step of a bucket runs as any other and brings up what libraries set up at first
use, the second is captured. All graphs share one pool of memory.

Steps that only write have buckets of their own. Whatever runs without a graph is counted by the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from mgraph.errors import PackageError
from mgraph.runtime.serving.step import Batch, Sampling

_ALIGNMENT = 16
CHOICE = ("temperature", "top_k", "top_p", "min_p", "seeds", "draws", "targets")
"""The inputs of the entry `sample` beside the logits; the last alone is that of `likeliest`."""


@dataclass(frozen=True, order=True)
class Bucket:
    """What a captured step holds; if it is `writing`, each request has one token."""

    tokens: int
    requests: int
    writing: bool


@dataclass(frozen=True)
class Decision:
    """The bucket that a step is replayed in, or why it is launched op by op."""

    bucket: Bucket | None
    why: str = ""


def choose(buckets: Sequence[Bucket], tokens: int, requests: int, rows: int) -> Decision:
    """The smallest bucket of its kind that holds a step."""
    writing = tokens == requests
    alike = [b for b in buckets if b.writing == writing]
    if not alike:
        return Decision(None, "no bucket for single tokens" if writing else "no bucket for parts of prompts")
    fitting = [b for b in alike if b.tokens >= tokens and b.requests >= requests]
    if not fitting:
        return Decision(None, "more tokens or requests than any bucket")
    if rows > min(fitting).requests:
        return Decision(None, "more rows of logits than requests")
    return Decision(min(fitting))


class Capture(Protocol):
    """Makes a function that runs on fixed tensors one that is replayed; also gives its fixed results."""

    def __call__(self, run: Callable[[], Sequence[Tensor]]) -> tuple[Callable[[], None], Sequence[Tensor]]:
        """Capture, which runs nothing."""
        ...


class CudaCapture:
    """CUDA graphs in one pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Sequence[Tensor]]) -> tuple[Callable[[], None], Sequence[Tensor]]:
        """As `EntryGraphs` of training does it (`mgraph.runtime.graphs`)."""
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            results = run()
        return graph.replay, results


class Inputs:
    """Fixed tensors on a device that are filled by one copy from the host."""

    def __init__(self, shapes: Mapping[str, tuple[tuple[int, ...], Any]], device: torch.device) -> None:
        """`shapes` gives shape and numpy dtype by name."""
        self._places: dict[str, tuple[int, int, Any]] = {}
        size = 0
        for name, (shape, dtype) in shapes.items():
            length = int(np.prod(shape)) * np.dtype(dtype).itemsize
            self._places[name] = size, length, dtype
            size += -(-length // _ALIGNMENT) * _ALIGNMENT
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._size = size
        self.tensors = {
            name: self._device[begin : begin + length]
            .view(torch.from_numpy(np.zeros(1, dtype)).dtype)
            .view(shapes[name][0])
            for name, (begin, length, dtype) in self._places.items()
        }

    def fill(self, arrays: dict[str, Any]) -> None:
        """Copy arrays of the declared sizes. The memory that is copied from is not written again before it was read."""
        host = torch.empty(self._size, dtype=torch.uint8, pin_memory=self._device.is_cuda)
        into = host.numpy()
        for name, (begin, length, dtype) in self._places.items():
            into[begin : begin + length] = np.ascontiguousarray(arrays[name], dtype).reshape(-1).view(np.uint8)
        self._device.copy_(host, non_blocking=True)


@dataclass
class _Part:
    """A captured function: how often it ran, what replays it, its results."""

    runs: int = 0
    replay: Callable[[], None] | None = None
    results: Sequence[Tensor] = ()


@dataclass
class _Held:
    """What there is for a bucket."""

    step: Inputs
    choice: Inputs
    parts: dict[str, _Part] = field(default_factory=dict)


class StepGraphs:
    """The graphs of a package's steps. `call` runs an entry on the state; `width` is that of block tables."""

    def __init__(
        self,
        call: Callable[..., Sequence[Tensor]],
        buckets: Sequence[Bucket],
        width: int,
        block_size: int,
        device: torch.device,
        capture: Capture,
    ) -> None:
        self.buckets = sorted(buckets)
        self.replayed = 0
        self.eager: Counter[str] = Counter()
        """Steps that ran without a graph, by reason."""
        self._call, self._width, self._block_size = call, width, block_size
        self._device, self._capture = device, capture
        self._held: dict[Bucket, _Held] = {}
        most = max((b.requests for b in self.buckets), default=1)
        self._last = torch.zeros(most, dtype=torch.int64, device=device)
        self._broken = ""

    def run(self, batch: Batch, sampling: Sampling) -> Sequence[Tensor] | None:
        """The results of a step's rows (tokens, log-probabilities, and the likeliest ones if asked for), or None where
        it is to run without a graph."""
        rows = len(batch.rows)
        decision = choose(self.buckets, len(batch.tokens), len(batch.lengths), rows)
        why = self._broken or decision.why
        if not why and (sampling.prompts is not None or sampling.bias is not None):
            why = "penalties or a bias"
        if not why and not rows:
            why = "no row of logits"
        if why or decision.bucket is None:
            self.eager[why] += 1
            return None
        bucket = decision.bucket
        held = self._held.get(bucket) or self._make(bucket)
        held.step.fill(self.padded(batch, bucket))
        held.choice.fill(_padded_choice(sampling, bucket.requests))
        likeliest = not (sampling.alternatives or sampling.temperature.any())
        entry, names = ("likeliest", CHOICE[-1:]) if likeliest else ("sample", CHOICE)
        (logits,) = self._part(held, "step", lambda: self._step(held))
        given = [held.choice.tensors[name] for name in names]
        results = self._part(held, entry, lambda: self._call(entry, logits, *given))
        self._last[: bucket.requests].copy_(results[0])
        return [result[:rows].clone() for result in results]

    def remember(self, tokens: Tensor) -> None:
        """What a step sampled that ran without a graph: the next one may ask for it."""
        if len(tokens) > len(self._last):
            self._last = torch.zeros(len(tokens), dtype=torch.int64, device=self._device)
            self._held.clear()  # their graphs read the old tensor
        self._last[: len(tokens)].copy_(tokens)

    @property
    def last(self) -> Tensor:
        """What the rows of the step before sampled."""
        return self._last

    def _make(self, bucket: Bucket) -> _Held:
        tokens, requests = bucket.tokens, bucket.requests
        i64, i32, f32 = np.int64, np.int32, np.float32
        step = {
            "tokens": ((tokens,), i64),
            "positions": ((tokens,), i64),
            "slots": ((tokens,), i64),
            "starts": ((requests + 1,), i32),
            "lengths": ((requests,), i32),
            "blocks": ((requests, self._width), i32),
            "rows": ((requests,), i64),
        }
        kinds = (f32, i32, f32, f32, i64, i64, i64)
        choice = {name: ((requests,), kind) for name, kind in zip(CHOICE, kinds, strict=True)}
        self._held[bucket] = _Held(Inputs(step, self._device), Inputs(choice, self._device))
        return self._held[bucket]

    def _step(self, held: _Held) -> Sequence[Tensor]:
        tokens, *others = held.step.tensors.values()
        return self._call("step", known(tokens, self._last), *others)

    def _part(self, held: _Held, name: str, run: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        """The first run of a part is one like any other; the second captures it. Its results keep their place."""
        part = held.parts.setdefault(name, _Part())
        part.runs += 1
        if part.runs == 1 or self._broken:
            return run()
        if part.replay is None:
            try:
                part.replay, part.results = self._capture(run)
            except (RuntimeError, PackageError) as error:  # nothing has run, so nothing has to be undone
                self._broken = f"the capture failed: {str(error).strip().splitlines()[0]}"
                return run()
        part.replay()
        self.replayed += name == "step"
        return part.results

    def padded(self, batch: Batch, bucket: Bucket) -> dict[str, Any]:
        """The arrays of a step, as long as the bucket's."""
        more = bucket.tokens - len(batch.tokens)
        requests = bucket.requests - len(batch.lengths)
        slots = np.concatenate([batch.slots, np.arange(more) % self._block_size])
        return {
            "tokens": np.pad(batch.tokens, (0, more)),
            "positions": np.pad(batch.positions, (0, more)),
            "slots": slots,
            "starts": np.pad(batch.starts, (0, requests), mode="edge"),
            "lengths": np.pad(batch.lengths, (0, requests)),
            "blocks": np.pad(batch.blocks, ((0, requests), (0, 0))),
            "rows": np.pad(batch.rows, (0, bucket.requests - len(batch.rows))),
        }


def known(tokens: Tensor, last: Tensor) -> Tensor:
    """The tokens, with what rows of the step before sampled in the places of unknown ones (`step.unknown`)."""
    return torch.where(tokens < 0, last[(-1 - tokens).clamp(min=0, max=len(last) - 1)], tokens)


def _padded_choice(sampling: Sampling, rows: int) -> dict[str, Any]:
    more = rows - len(sampling.temperature)
    return {name: np.pad(getattr(sampling, name), (0, more)) for name in CHOICE}
