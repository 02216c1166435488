"""Which part of which tensor of a file belongs where in the state: the manifest's `weight_layout`.

A tensor of a file is put together of parts of the state's tensors: a part has one shape, and in each of the two an
offset and strides, in elements. What the manifest does not mention lies in a file as it is, under its own name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mgraph.runtime.overlaps import View, contiguous, overlaps
from mgraph.runtime.package import State, StateSpec
from mgraph.runtime.shards import Piece

COMPARED = 2**24
"""Elements that are compared at once."""


@dataclass(frozen=True)
class Held:
    """What a rank has of a tensor of the state, whose whole has `shape`: `local`, made of pieces."""

    local: Tensor
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def equals(self, whole: Tensor) -> bool:
        """Whether a tensor, in this dtype, has the same elements where this rank has any. A part of it is compared at
        once: a tensor that is only looked at is not to be copied whole."""
        pairs = [(piece.of_whole(whole), piece.of(self.local)) for piece in self.pieces]
        parts = (zip(a.reshape(-1).split(COMPARED), b.reshape(-1).split(COMPARED), strict=True) for a, b in pairs)
        return all(torch.equal(given.to(mine), mine) for pair in parts for given, mine in pair)


@dataclass(frozen=True)
class Part:
    """What a tensor of a file has of one tensor of the state: `inside` that one, and `place` in the file's."""

    state: str
    inside: View
    place: View


@dataclass(frozen=True)
class FileTensor:
    """A tensor as it lies in a file."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def write(self, held: Mapping[str, Held], given: Tensor) -> None:
        """Copy a file's tensor, or what belongs there of it, to what is held of the states, converting dtypes."""
        for part in self.parts:
            if part.state in held:
                target = held[part.state]
                for piece in target.pieces:
                    for start, box in overlaps(part.inside, target.shape, piece, tuple(target.local.shape)):
                        of_view(target.local, box).copy_(of_view(given, part.place.box(start, box.shape)))

    def read(self, state: State, names: Mapping[str, str], dtype: torch.dtype) -> Tensor:
        """The tensor, contiguous on the CPU; a view where it lies in the state just so."""
        first = self.parts[0]
        if len(self.parts) == 1 and first.place == contiguous(self.shape):
            return of_view(state[names[first.state]].detach(), first.inside).contiguous().cpu().to(dtype)
        made = torch.empty(self.shape, dtype=dtype)
        for part in self.parts:
            of_view(made, part.place).copy_(of_view(state[names[part.state]].detach(), part.inside))
        return made


def file_tensors(items: Iterable[Mapping[str, Any]], specs: Iterable[StateSpec]) -> list[FileTensor]:
    """The tensors of files that have these tensors of a state, in their order; `items` as the manifest has them."""
    named = [_from_manifest(item) for item in items]
    by_state: dict[str, list[FileTensor]] = {}
    for tensor in named:
        for part in tensor.parts:
            by_state.setdefault(part.state, []).append(tensor)
    ordered: dict[str, FileTensor] = {}
    for spec in specs:
        for tensor in by_state.get(spec.name) or [as_it_is(spec)]:
            ordered[tensor.name] = tensor
    return list(ordered.values())


def as_it_is(spec: StateSpec) -> FileTensor:
    """A tensor of the state, whole and under its own name."""
    view = contiguous(spec.shape)
    return FileTensor(spec.name, spec.shape, (Part(spec.name, view, view),))


def of_view(tensor: Tensor, view: View) -> Tensor:
    """A view of a contiguous tensor."""
    return tensor.as_strided(view.shape, view.strides, tensor.storage_offset() + view.offset)


def _from_manifest(item: Mapping[str, Any]) -> FileTensor:
    parts = tuple(Part(p["state"], _view(p["shape"], p["from"]), _view(p["shape"], p["to"])) for p in item["parts"])
    return FileTensor(item["tensor"], tuple(item["shape"]), parts)


def _view(shape: list[int], numbers: list[int]) -> View:
    return View(tuple(shape), numbers[0], tuple(numbers[1:]))
