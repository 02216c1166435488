"""Replays entries of a step as CUDA graphs.

The first call with inputs of some shapes runs as any other: it is a step like the others, and brings up what libraries
set up at first use, so that nothing has to be undone. The second is captured, which runs nothing, and replayed; from
then on a call copies its inputs into those of the graph, launches it, and gives copies of its results. All graphs share
one pool of memory, but for those that are captured after a capture has failed. What is random in a step is read from
its state (`rng.*`), and so differs from replay to replay.
An entry that cannot be one graph may be several: calls of some of its functions (`pieces.py`).
"""

from __future__ import annotations

import functools
import operator
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mgraph.errors import PackageError
from mgraph.runtime import later
from mgraph.runtime.collectives import begin_entry
from mgraph.runtime.pieces import GivenUp, Graph, Recorder, Tape

State = dict[str, Tensor]
Entry = Callable[..., tuple[Tensor, ...]]
MOST_SHAPES = 8
"""Sets of input shapes per entry for which there are graphs; others run op by op."""


@dataclass
class _Captured:
    """A graph, the tensors it reads and writes, and the state it was made on."""

    graph: Graph
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    state: tuple[Tensor, ...]

    def replay(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        for mine, given in zip(self.inputs, inputs, strict=True):
            mine.copy_(given)
        self.graph.replay()
        return tuple(output.clone() for output in self.outputs)


class Pool:
    """Captures on a stream of its own, into one pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def record(self, function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        """The graph of what a function launches, and what it gave; nothing runs."""
        graph = torch.cuda.CUDAGraph()
        # A capture that fails leaves its stream as the current one: the outer context puts ours back. Other threads (a
        # checkpoint's, a collective's watchdog) may go on with the device meanwhile.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            result = function()
        return graph, result

    def view(self, tensor: Tensor) -> Tensor:
        """The same memory, as a tensor that owns none of it."""
        if not tensor.numel():
            return torch.empty_like(tensor)
        last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
        memory = torch.as_tensor(_Memory(tensor.data_ptr(), (last + 1) * tensor.element_size()), device=tensor.device)
        return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


class _Memory:
    """Bytes of a GPU, as torch takes them from other libraries."""

    def __init__(self, at: int, count: int) -> None:
        self.__cuda_array_interface__ = {"data": (at, False), "shape": (count,), "typestr": "|u1", "version": 3}


class EntryGraphs:
    """The graphs of a package's entries, made as they are called.

    `captured` are the entries that are one graph, `pieces` gives the functions of which calls are graphs in others.
    """

    def __init__(
        self,
        captured: Collection[str],
        pieces: Mapping[str, Collection[str]] | None = None,
        new_pool: Callable[[], Recorder] = Pool,
    ) -> None:
        self._entries = {name: frozenset[str]() for name in captured}
        self._entries |= {name: frozenset(functions) for name, functions in (pieces or {}).items()}
        self._held: dict[tuple[Any, ...], _Captured | Tape | None] = {}
        self._said: set[str] = set()
        self._new_pool = new_pool
        self._pool: Recorder | None = None
        self._tape: Tape | None = None
        """That of the entry which runs in pieces, and of what the pieces are calls."""
        self._pieces: frozenset[str] = frozenset()
        self._failed: GivenUp | None = None

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
        if held is not None and not _same(held.state, state):
            held = None
        if self._entries[name]:
            return self._in_pieces(key, held, entry, state, inputs)
        if held is None:
            try:
                held = self._held[key] = self._capture(entry, state, inputs)
            except (RuntimeError, PackageError) as error:  # torch and the driver raise nothing more exact
                # Nothing has run; lack of memory, too, may be that of the graph alone.
                self._pool = None
                del self._entries[name]
                self._say(name, str(error).strip().splitlines()[0])
                begin_entry()
                return entry(state, *inputs)
        assert isinstance(held, _Captured), f"{name} is one graph"
        return held.replay(inputs)

    def piece(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of step.py, of which calls may be graphs. It does not keep these: a module may outlive them."""
        owner = weakref.ref(self)

        @functools.wraps(function)
        def piece(*args: Any, **kwargs: Any) -> Any:
            graphs = owner()
            tape = graphs._tape if graphs is not None else None
            if graphs is None or tape is None or name not in graphs._pieces:
                return function(*args, **kwargs)
            graphs._tape = None  # what it calls is part of its graph
            try:
                with later.at_once():
                    result = tape.call(name, function, args, kwargs)
            except GivenUp as error:
                graphs._failed = error
                return function(*args, **kwargs)
            graphs._tape = tape
            return result

        return piece

    def _in_pieces(
        self, key: tuple[Any, ...], held: Any, entry: Entry, state: State, inputs: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """The entry as it is, but for calls of pieces. When one fails, nothing later in this run is a graph."""
        name = key[0]
        tape = held or Tape(self._recorder(), tuple(state.values()))
        self._held[key] = None
        self._failed = None
        self._tape, self._pieces = tape, self._entries[name]
        tape.begin()
        try:
            outputs = tuple(output.clone() for output in entry(state, *inputs))
        finally:
            self._tape = None
            tape.end()
        if self._failed is None:
            self._held[key] = tape
            return outputs
        self._pool = None
        piece = self._failed.piece
        self._say(f"{name}: {piece}" if piece else name, str(self._failed.args[0]))
        left = self._entries[name] - {piece} if piece else frozenset()
        self._entries[name] = left
        if not left:
            del self._entries[name]
        return outputs

    def _recorder(self) -> Recorder:
        """Where graphs are captured; a new one after a capture has failed, as torch captures nothing more there."""
        if self._pool is None:
            self._pool = self._new_pool()
        return self._pool

    def _capture(self, entry: Entry, state: State, inputs: Sequence[Tensor]) -> _Captured:
        own = tuple(t.clone() for t in inputs)
        graph, outputs = self._recorder().record(lambda: entry(state, *own))
        return _Captured(graph, own, outputs, tuple(state.values()))

    def _say(self, name: str, reason: str) -> None:
        """Why an entry is launched op by op, once."""
        if name not in self._said:
            self._said.add(name)
            warnings.warn(f"{name} runs without a CUDA graph: {reason}", RuntimeWarning, stacklevel=3)


def _same(tensors: Sequence[Tensor], state: State) -> bool:
    """Whether a state is still the tensors that a graph works on."""
    return len(state) == len(tensors) and all(map(operator.is_, tensors, state.values()))
