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

from mgraph.runtime.package import State, StateSpec


@dataclass(frozen=True)
class View:
    """A part of a contiguous tensor: where its first element is, and how far apart neighbours are along each dim."""

    offset: int
    strides: tuple[int, ...]

    def of(self, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The part, of this shape."""
        return tensor.as_strided(shape, self.strides, tensor.storage_offset() + self.offset)


@dataclass(frozen=True)
class Part:
    """What a tensor of a file has of one tensor of the state: `inside` that one, and `place` in the file's."""

    state: str
    shape: tuple[int, ...]
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

    def write(self, state: State, names: Mapping[str, str], given: Tensor) -> None:
        """Copy a file's tensor to where its parts belong, converting dtypes; `names` replace those of the state."""
        for part in self.parts:
            target = names.get(part.state)
            if target is not None:
                part.inside.of(state[target], part.shape).copy_(part.place.of(given, part.shape))

    def read(self, state: State, names: Mapping[str, str], dtype: torch.dtype) -> Tensor:
        """The tensor, contiguous on the CPU; a view where it lies in the state just so."""
        first = self.parts[0]
        if len(self.parts) == 1 and first.place == _whole(self.shape):
            return first.inside.of(state[names[first.state]].detach(), self.shape).contiguous().cpu().to(dtype)
        made = torch.empty(self.shape, dtype=dtype)
        for part in self.parts:
            part.place.of(made, part.shape).copy_(part.inside.of(state[names[part.state]].detach(), part.shape))
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
    view = _whole(spec.shape)
    return FileTensor(spec.name, spec.shape, (Part(spec.name, spec.shape, view, view),))


def _whole(shape: tuple[int, ...]) -> View:
    return View(0, tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape))))


def _from_manifest(item: Mapping[str, Any]) -> FileTensor:
    parts = tuple(Part(p["state"], tuple(p["shape"]), _view(p["from"]), _view(p["to"])) for p in item["parts"])
    return FileTensor(item["tensor"], tuple(item["shape"]), parts)


def _view(numbers: list[int]) -> View:
    return View(numbers[0], tuple(numbers[1:]))
