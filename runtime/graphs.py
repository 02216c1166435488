"""Replays entries of a step as CUDA graphs.

The first call with inputs of some shapes runs as any other: it is a step like the others, and brings up what libraries
set up at first use, so that nothing has to be undone. The second is captured, which runs nothing, and replayed; from
then on a call copies its inputs into those of the graph, launches it, and gives copies of its results. All graphs share
one pool of memory. What is random in a step is read from its state (`rng.*`), and so differs from replay to replay.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mgraph.errors import PackageError

State = dict[str, Tensor]
Entry = Callable[..., tuple[Tensor, ...]]
MOST_SHAPES = 8
"""Sets of input shapes per entry for which there are graphs; others run op by op."""


@dataclass
class _Captured:
    """A graph, the tensors it reads and writes, and the state it was made on."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    state: tuple[Tensor, ...]

    def is_of(self, state: State) -> bool:
        """Whether a state is still the tensors that the graph works on."""
        return len(state) == len(self.state) and all(map(operator.is_, self.state, state.values()))

    def replay(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        for mine, given in zip(self.inputs, inputs, strict=True):
            mine.copy_(given)
        self.graph.replay()
        return tuple(output.clone() for output in self.outputs)


class EntryGraphs:
    """The graphs of a package's entries, made as they are called."""

    def __init__(self, captured: Collection[str]) -> None:
        self._entries = frozenset(captured)
        self._held: dict[tuple[Any, ...], _Captured | None] = {}
        self._said: set[str] = set()
        self._pool: Any = None

    def call(self, name: str, entry: Entry, state: State, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What `entry(state, *inputs)` gives, by a graph where there is one."""
        if name not in self._entries:
            return entry(state, *inputs)
        key = (name, *((tuple(t.shape), t.dtype) for t in inputs))
        if key not in self._held:
            if sum(held[0] == name for held in self._held) >= MOST_SHAPES:
                self._say(name, f"it was called with more than {MOST_SHAPES} sets of shapes")
                return entry(state, *inputs)
            self._held[key] = None
            return entry(state, *inputs)
        held = self._held[key]
        if held is None or not held.is_of(state):
            try:
                held = self._held[key] = self._capture(entry, state, inputs)
            except (RuntimeError, PackageError) as error:  # torch and the driver raise nothing more exact
                # Nothing has run, so nothing has to be undone; lack of memory, too, may be that of the graph alone.
                self._entries -= {name}
                self._say(name, str(error).strip().splitlines()[0])
                return entry(state, *inputs)
        return held.replay(inputs)

    def _capture(self, entry: Entry, state: State, inputs: Sequence[Tensor]) -> _Captured:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        own = tuple(t.clone() for t in inputs)
        graph = torch.cuda.CUDAGraph()
        # A capture that fails leaves its stream as the current one: the outer context puts ours back. Other threads (a
        # checkpoint's, a collective's watchdog) may go on with the device meanwhile.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            outputs = entry(state, *own)
        return _Captured(graph, own, outputs, tuple(state.values()))

    def _say(self, name: str, reason: str) -> None:
        """Why an entry is launched op by op, once."""
        if name not in self._said:
            self._said.add(name)
            warnings.warn(f"{name} runs without a CUDA graph: {reason}", RuntimeWarning, stacklevel=3)
