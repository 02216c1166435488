"""Replays steps of a serve package as CUDA graphs: one for each bucket of tokens and requests, made when it is needed.

A step is written into the fixed inputs of the smallest bucket of its kind that holds it, by one copy, and padded: more
tokens, which belong to no request and write to block 0; more requests, which have no tokens; more rows of logits, which
are those of token 0 again. The first step of a bucket runs as any other and brings up what libraries set up at first
use, the second is captured. Steps that only write have buckets of their own.

All steps write their logits to one place, where what samples reads them: that is captured apart, for each entry and
number of rows, and shared by the buckets. All graphs share one pool of memory, in which nothing outlives a step but the
results of what samples, a few numbers a row. So a graph costs little besides its launches.

Which graph a step takes follows from its `Key`, and so does why it takes none, which is counted.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from mgraph.errors import PackageError
from mgraph.runtime.serving.choices import INPUTS, PENALTIES, Sampler, called, text_of, with_all
from mgraph.runtime.serving.dispatch import Bucket, Key, Why, choose
from mgraph.runtime.serving.step import Batch, Sampling

_ALIGNMENT = 16
_Shapes = dict[str, tuple[tuple[int, ...], Any]]
"""Shape and numpy dtype of inputs by name."""
_Name = Bucket | tuple[int, Sampler, int, int | None]
"""What there is a graph of: steps, or what samples so many rows, with texts of a length, before padding."""


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

    def __init__(self, shapes: _Shapes, device: torch.device) -> None:
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
    """What there is for a bucket, or for what samples: its inputs and its graph."""

    inputs: Inputs
    part: _Part = field(default_factory=_Part)


class StepGraphs:
    """The graphs of a package's steps. `call` runs an entry on the state, `sample` what samples op by op; a step has at
    most `most_rows` rows of logits; `width` is that of block tables, of which each of `groups` of layers has its
    own."""

    def __init__(
        self,
        call: Callable[..., Sequence[Tensor]],
        sample: Callable[[Tensor, Sampling], Sequence[Tensor]],
        buckets: Sequence[Bucket],
        most_rows: int,
        width: int,
        block_size: int,
        device: torch.device,
        capture: Capture,
        groups: int = 1,
        batch_invariant: bool = False,
    ) -> None:
        self.buckets = sorted(buckets)
        self.replayed = 0
        self.eager: Counter[str] = Counter()
        """Steps that ran without a graph, or whose sampling did, by reason."""
        self.failure = ""
        """What a capture said that failed; there are none after it."""
        self._call, self._sample_eagerly = call, sample
        self._width, self._block_size, self._groups = width, block_size, groups
        self._device, self._capture, self._batch_invariant = device, capture, batch_invariant
        self._held: dict[_Name, _Held] = {}
        self._most = max((b.requests for b in self.buckets), default=1)
        # Graphs read it, and they live as long as their pool: torch cannot capture into one whose graphs are all gone.
        self._last = torch.zeros(max(self._most, most_rows), dtype=torch.int64, device=device)
        self._logits: Tensor | None = None
        self._bias: Tensor | None = None
        self._biased = 0  # rows of it that may be other than 0

    @property
    def _failed(self) -> str:
        return f"{Why.FAILED}: {self.failure}"

    @property
    def launches(self) -> Counter[str]:
        """Steps by how they were launched: `graph`, or why not."""
        eager = dict(self.eager)  # at once: another thread than that of the steps may ask
        return Counter({"graph": self.replayed}) + Counter(eager)

    def run(self, batch: Batch, sampling: Sampling) -> Sequence[Tensor] | None:
        """The results of a step's rows (tokens, log-probabilities, and the likeliest ones if asked for; nothing where
        there is no row), or None where it is to run without a graph."""
        key = Key.of(batch, sampling)
        decision = choose(self.buckets, key)
        why = self._failed if self.failure else decision.why
        if why is not None:
            self.eager[why] += 1
        if self.failure or decision.bucket is None:
            return None
        self._replay_step(decision.bucket, batch, counted=why is None)
        assert self._logits is not None, "the step has written them"
        if key.sampler is Sampler.NONE:
            return ()
        rows = key.rows
        if why is Why.LONG_TEXTS:
            results = self._sample_eagerly(self._logits[:rows], sampling)
        else:
            results = self._replay_sampler(decision.bucket.requests, key.sampler, decision.text, sampling)
            results = [result[:rows].clone() for result in results]
            results = with_all(results, self._logits[:rows], sampling, self._batch_invariant)
        self._last[:rows].copy_(results[0])
        return results

    def remember(self, tokens: Tensor) -> None:
        """What a step sampled that ran without a graph: the next one may ask for it."""
        self._last[: len(tokens)].copy_(tokens)

    @property
    def last(self) -> Tensor:
        """What the rows of the step before sampled."""
        return self._last

    def replay_of(self, name: _Name) -> Callable[[], None]:
        """What replays a bucket's step, or what samples so many rows, as it ran last. It has to be captured."""
        replay = self._held[name].part.replay
        assert replay is not None, f"{name} was not captured"
        return replay

    def _replay_step(self, bucket: Bucket, batch: Batch, counted: bool) -> None:
        held = self._held.get(bucket) or self._make(bucket, self._step_inputs(bucket))
        held.inputs.fill(self.padded(batch, bucket))
        launched = self._part(held.part, lambda: self._step(held.inputs, bucket.requests))
        if counted and launched:
            self.replayed += 1
        elif counted:
            self.eager[self._failed if self.failure else Why.FIRST] += 1

    def _replay_sampler(self, rows: int, sampler: Sampler, text: int, sampling: Sampling) -> Sequence[Tensor]:
        name = rows, sampler, text, sampling.padding_from
        held = self._held.get(name) or self._make(name, _sampler_inputs(rows, sampler, text))
        if sampler is Sampler.CHANGED:
            self._write_bias(sampling)
        held.inputs.fill(_padded_choice(sampling, rows, sampler, text))
        results: Sequence[Tensor] = ()

        def run() -> Sequence[Tensor]:
            nonlocal results
            results = self._sample(held.inputs.tensors, rows, sampler, sampling.padding_from)
            return results

        return held.part.results if self._part(held.part, run) else results

    def _make(self, name: _Name, inputs: _Shapes) -> _Held:
        self._held[name] = _Held(Inputs(inputs, self._device))
        return self._held[name]

    def _step_inputs(self, bucket: Bucket) -> _Shapes:
        tokens, requests = bucket.tokens, bucket.requests
        i64, i32 = np.int64, np.int32
        return {
            "tokens": ((tokens,), i64),
            "positions": ((tokens,), i64),
            "slots": ((tokens,), i64),
            "starts": ((requests + 1,), i32),
            "lengths": ((requests,), i32),
            "blocks": ((requests, self._width), i32),
            **{
                f"{name}_{group}": shape
                for group in range(1, self._groups)
                for name, shape in (("slots", ((tokens,), i64)), ("blocks", ((requests, self._width), i32)))
            },
            "rows": ((requests,), i64),
        }

    def _step(self, inputs: Inputs, rows: int) -> Sequence[Tensor]:
        tokens, *others = inputs.tensors.values()
        (logits,) = self._call("step", known(tokens, self._last), *others)
        if self._logits is None:  # in the first step of all, which is not captured
            self._logits = logits.new_empty(self._most, logits.shape[1])
        self._logits[:rows].copy_(logits)
        return ()

    def _sample(
        self, given: Mapping[str, Tensor], rows: int, sampler: Sampler, padding_from: int | None
    ) -> Sequence[Tensor]:
        assert self._logits is not None, "a step has written them"
        logits = self._logits[:rows]
        if sampler is not Sampler.CHANGED:
            return called(self._call, sampler, logits, list(given.values()), padding_from)
        assert self._bias is not None, "it was written"
        *choice, tokens, owners, written = given.values()
        changes = [*choice, self._bias[:rows], known(tokens, self._last), owners, written]
        return called(self._call, sampler, logits, changes, padding_from)

    def _write_bias(self, sampling: Sampling) -> None:
        """Fill the one place that graphs read a bias from; what no row has is 0."""
        assert self._logits is not None, "a step has written them"
        if self._bias is None:
            self._bias = torch.zeros_like(self._logits)
        count = 0 if sampling.bias is None else len(sampling.bias)
        if sampling.bias is not None:
            host = torch.from_numpy(sampling.bias)
            host = host.pin_memory() if self._device.type == "cuda" else host
            self._bias[:count].copy_(host, non_blocking=True)
        self._bias[count : self._biased].zero_()
        self._biased = count

    def _part(self, part: _Part, run: Callable[[], Sequence[Tensor]]) -> bool:
        """The first run of a part is one like any other; the second captures it. Its results keep their place. False
        where it was launched op by op."""
        part.runs += 1
        if part.runs == 1 or self.failure:
            run()
            return False
        if part.replay is None:
            try:
                part.replay, part.results = self._capture(run)
            except (RuntimeError, PackageError) as error:  # nothing has run, so nothing has to be undone
                self.failure = str(error).strip().splitlines()[0]
                warnings.warn(f"all steps run without CUDA graphs: {self.failure}", RuntimeWarning, stacklevel=2)
                run()
                return False
        part.replay()
        return True

    def padded(self, batch: Batch, bucket: Bucket) -> dict[str, Any]:
        """The arrays of a step, as long as the bucket's."""
        more = bucket.tokens - len(batch.tokens)
        requests = bucket.requests - len(batch.lengths)
        spare = np.arange(more) % self._block_size
        return replace(
            batch,
            tokens=np.pad(batch.tokens, (0, more)),
            positions=np.pad(batch.positions, (0, more)),
            slots=tuple(np.concatenate([slots, spare]) for slots in batch.slots),
            starts=np.pad(batch.starts, (0, requests), mode="edge"),
            lengths=np.pad(batch.lengths, (0, requests)),
            blocks=tuple(np.pad(blocks, ((0, requests), (0, 0))) for blocks in batch.blocks),
            rows=np.pad(batch.rows, (0, bucket.requests - len(batch.rows))),
        ).inputs()


def known(tokens: Tensor, last: Tensor) -> Tensor:
    """The tokens, with what rows of the step before sampled in the places of unknown ones (`step.unknown`)."""
    return torch.where(tokens < 0, last[(-1 - tokens).clamp(min=0, max=len(last) - 1)], tokens)


_DTYPES = {"top_k": np.int32, "seeds": np.int64, "draws": np.int64, "targets": np.int64}
"""Of the numbers of rows; all others are f32."""


def _sampler_inputs(rows: int, sampler: Sampler, text: int) -> _Shapes:
    inputs: _Shapes = {name: ((rows,), _DTYPES.get(name, np.float32)) for name in INPUTS[sampler]}
    if sampler is Sampler.CHANGED:
        inputs |= {"tokens": ((text,), np.int64), "owners": ((text,), np.int64), "written": ((text,), np.bool_)}
    return inputs


def _padded_choice(sampling: Sampling, rows: int, sampler: Sampler, text: int) -> dict[str, Any]:
    """The arrays of what samples, as long as its inputs. Rows beyond the step's are greedy and have no text."""
    more = rows - len(sampling.targets)
    padded: dict[str, Any] = {
        name: np.pad(getattr(sampling, name), (0, more), constant_values=name in PENALTIES) for name in INPUTS[sampler]
    }
    if sampler is Sampler.CHANGED:
        tokens, owners, written = text_of(sampling)
        owners[0] = rows
        padded["tokens"] = np.pad(tokens, (0, text - len(tokens)))
        padded["owners"] = np.pad(owners, (0, text - len(owners)), constant_values=rows)
        padded["written"] = np.pad(written, (0, text - len(written)))
    return padded
