"""Replays the pieces of an entry, calls of some functions of step.py, as CUDA graphs; what lies between runs as it is.

The first run of an entry with inputs of some shapes is like any other. In the second each call of such a function is
captured, which runs nothing, and launched; later runs launch the same graphs in the same order. All graphs share one
pool of memory, as one graph would: a tensor that a piece gives lives in the pool for as long as step.py holds it in
the run that is captured, and then its place is free for later pieces. Later runs hold it as long, for they run the same
statements, so nothing that is read later is overwritten. What they are given are views of the pool that own nothing,
the same ones in each run: they are valid until the entry returns, and what it returns is copied.

A graph reads what it is handed where it was when it was captured. State stays where it is, and what earlier pieces gave
is at the same place in each run. All else (what is made between pieces) is copied, into a place in the pool that is
taken for as long as the tensor lives; a tensor that several pieces take is copied once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import deterministic

from mgraph.errors import PackageError

Function = Callable[..., Any]


class Graph(Protocol):
    """What was captured."""

    def replay(self) -> None:
        """Launch it."""


class Recorder(Protocol):
    """What captures: on a GPU `graphs.Pool`."""

    def record(self, function: Callable[[], Any]) -> tuple[Graph, Any]:
        """The graph of what a function launches, and what the function gave."""

    def view(self, tensor: Tensor) -> Tensor:
        """The same memory, as a tensor that owns none of it."""


class GivenUp(PackageError):
    """Graphs that cannot be had: those of calls of the function `piece`, or any, where that is empty."""

    def __init__(self, piece: str, reason: str) -> None:
        super().__init__(reason)
        self.piece = piece


@dataclass(frozen=True)
class _Read:
    """Where a graph reads a tensor that it is handed. The `copy` of that number is there; without, it is itself."""

    place: Tensor
    copy: int | None = None
    is_first: bool = False
    """Whether this piece is the first that takes the copy, and so makes it."""


@dataclass(frozen=True)
class _Piece:
    """One call: the graph, what it reads, what it gives, and whether it empties lists that it is handed."""

    name: str
    graph: Graph
    reads: tuple[_Read, ...]
    gives: Any
    empties: bool


class _Known:
    """What belongs to tensors, for as long as they live."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[weakref.ref[Tensor], Any]] = {}

    def of(self, tensor: Tensor) -> Any:
        """What belongs to it, or None."""
        held = self._held.get(id(tensor))
        return held[1] if held is not None and held[0]() is tensor else None

    def add(self, tensor: Tensor, what: Any) -> None:
        """Let something belong to a tensor."""
        key = id(tensor)
        self._held[key] = (weakref.ref(tensor, lambda _: self._held.pop(key, None)), what)

    def forget(self) -> None:
        """Let nothing belong to any tensor."""
        self._held.clear()


class Tape:
    """The pieces of an entry, in the order of their calls, for inputs of some shapes and one state."""

    def __init__(self, recorder: Recorder, state: Sequence[Tensor]) -> None:
        self.state = tuple(state)
        self._recorder = recorder
        self._pieces: list[_Piece] = []
        self._position = 0
        self._is_whole = False
        self._fixed = {_memory(tensor) for tensor in state}
        """Where the memory begins of state, and of what pieces gave: it is the same in each run."""
        self._views = _Known()
        """Of state and of what pieces gave in the run that is captured: what later ones are given."""
        for tensor in state:
            self._views.add(tensor, tensor)
        self._copies = _Known()
        """Of what was copied: the place of the copy, its number, and of which version of the tensor it is."""
        self._sources: list[int] = []
        """Where each tensor that is copied lay in this run."""

    def begin(self) -> None:
        """The entry is called."""
        self._position = 0

    def end(self) -> None:
        """The entry has returned, or has raised: what was captured is all that there is."""
        self._is_whole = True
        self._views.forget()
        self._copies.forget()

    def call(self, name: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the function gives. Raises GivenUp where nothing was launched: the function may be called instead."""
        if not self._is_whole:
            return self._capture(name, function, args, kwargs)
        if self._position >= len(self._pieces) or self._pieces[self._position].name != name:
            raise GivenUp("", f"step.py calls {name} in another order than before")
        piece = self._pieces[self._position]
        self._position += 1
        self._copy(piece, list(_tensors(args)))
        piece.graph.replay()
        if piece.empties:
            _empty(args)
        return _mapped(piece.gives, lambda tensor: tensor)

    def _copy(self, piece: _Piece, given: Sequence[Tensor]) -> None:
        """Bring what a piece is handed to where it reads it."""
        moved = f"what {piece.name} is handed is not where it was when it was captured"
        if len(given) != len(piece.reads):
            raise GivenUp("", moved)
        for read, tensor in zip(piece.reads, given, strict=True):
            if tensor is read.place:
                continue
            at, place = tensor.data_ptr(), read.place
            same = (tensor.shape, tensor.dtype) == (place.shape, place.dtype)
            if read.copy is None:
                same &= at == place.data_ptr() and tensor.stride() == place.stride()
            elif not read.is_first:
                same &= at == self._sources[read.copy]
            if not same:
                raise GivenUp("", moved)
            if read.is_first and read.copy is not None:
                place.copy_(tensor)
                self._sources[read.copy] = at

    def _capture(self, name: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Capture a call, and launch it. The lists that the function is handed are its own, so that what it lets go of
        there makes room for what it makes."""
        reads = [_Read(self._view(tensor)) if self._is_fixed(tensor) else None for tensor in _tensors(args)]
        before = [(part, _mapped(part, self._held)) for part in args if isinstance(part, list)]
        made: list[tuple[Tensor, Tensor]] = []
        taken: list[tuple[Tensor, int, bool]] = []
        handed: list[Any] = []

        def place(tensor: Tensor) -> Tensor:
            if self._is_fixed(tensor):
                return tensor
            known = self._copies.of(tensor)
            if known is None or known[2] != tensor._version:  # that was written since
                same = [number for number, (source, _) in enumerate(made) if source is tensor]
                if not same:
                    made.append((tensor, _like(tensor)))
                number = same[0] if same else len(made) - 1
                taken.append((made[number][1], len(self._sources) + number, not same))
            else:
                taken.append((*known[:2], False))
            return taken[-1][0]

        def run() -> Any:
            own = _mapped(args, place)
            handed.extend(part for part in own if isinstance(part, list))
            _empty(args)
            return function(*own, **kwargs)

        try:
            graph, result = self._recorder.record(run)
        except (RuntimeError, PackageError) as error:  # torch and the driver raise nothing more exact
            for part, tensors in before:
                part[:] = tensors
            raise GivenUp(name, str(error).strip().splitlines()[0]) from error
        for source, copy in made:
            copy.copy_(source)
            self._copies.add(source, (copy, len(self._sources), source._version))
            self._sources.append(source.data_ptr())
            self._fixed.add(_memory(copy))
        graph.replay()
        for (part, _), own in zip(before, handed, strict=True):
            part[:] = own
        copies = iter([_Read(self._recorder.view(copy), number, first) for copy, number, first in taken])
        gives = _mapped(result, self._give)
        empties = bool(handed) and not any(handed)
        self._pieces.append(_Piece(name, graph, tuple(r or next(copies) for r in reads), gives, empties))
        return result

    def _is_fixed(self, tensor: Tensor) -> bool:
        return _memory(tensor) in self._fixed

    def _view(self, tensor: Tensor) -> Tensor:
        """What later runs are given in the place of a tensor that stays where it is."""
        view = self._views.of(tensor)
        return view if view is not None else self._recorder.view(tensor)

    def _held(self, tensor: Tensor) -> Tensor:
        return self._view(tensor) if self._is_fixed(tensor) else tensor

    def _give(self, tensor: Tensor) -> Tensor:
        view = self._view(tensor)
        self._views.add(tensor, view)
        self._fixed.add(_memory(tensor))
        return view


def _memory(tensor: Tensor) -> int:
    """Where the memory begins that a tensor is in."""
    return tensor.untyped_storage().data_ptr()


def _like(tensor: Tensor) -> Tensor:
    """Room for a copy: of the same strides, where no two elements share a place. Nothing is written there, which would
    be part of the graph; torch does so where it is to be deterministic."""
    settings: Any = deterministic
    filled, settings.fill_uninitialized_memory = settings.fill_uninitialized_memory, False
    try:
        if any(stride == 0 and extent > 1 for extent, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            return torch.empty_like(tensor)
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    finally:
        settings.fill_uninitialized_memory = filled


def _tensors(given: Any) -> Iterator[Tensor]:
    """The tensors of what a function is handed, or gives: tensors, numbers, and lists of these."""
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, tuple | list):
        for part in given:
            yield from _tensors(part)


def _mapped(given: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same with other tensors, in new lists."""
    if isinstance(given, Tensor):
        return change(given)
    if isinstance(given, tuple | list):
        return type(given)(_mapped(part, change) for part in given)
    return given


def _empty(args: tuple[Any, ...]) -> None:
    for part in args:
        if isinstance(part, list):
            part.clear()
