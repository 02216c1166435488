"""Tables on the device for kernels over lists of tensors: which tensor, and which chunk of it, each program takes.

A kernel over lists runs once over all of their elements. Entry i of every list has the same shape. It is one piece
where it is contiguous in all lists; where it is a view with gaps in one, such as a part along a later dim, it is many:
rows that are contiguous in all. Pieces are cut into chunks, one a program. The kernel reads, with b the number of its
program,

    owners[b] i32       the piece i that the program works on
    chunks[b] i32       the number of its chunk in that piece
    sizes[i] i64        the elements of the piece, divided by `unit`
    <list>_at[i] i64    how many elements it lies behind the first tensor of the list, divided by `unit`
    <numbers>[i] f32    a number of its entry, such as a rate

and is given the first tensor of each list. Entries with even places and sizes make a `Part` with a `unit` of 16, which
a binary that knows of it moves 16 bytes at a time; the others make one with a `unit` of 1. A part is one launch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

UNIT = 16
"""Elements that the larger unit counts."""

MOST_KEPT = 64
"""Sets of tables kept, one per combination of places and sizes; then all but those of captured graphs go."""


class Part(NamedTuple):
    """What a launch is given for the entries of one unit: the tables, the place of its first tensor in each list
    (`base`), the unit, and the number of programs in this part and in those before it."""

    tables: Mapping[str, Tensor]
    base: int
    unit: int
    blocks: int
    before: int


Places = tuple[tuple[Any, ...], ...]
"""Addresses and sizes of lists, with the strides of views: what their tables follow from."""


def places(lists: Mapping[str, Sequence[Tensor]]) -> Places:
    """Where the tensors of lists lie."""
    found: list[tuple[Any, ...]] = []
    for tensors in lists.values():
        views = [(t.shape, t.stride()) for t in tensors if not t.is_contiguous()]
        found.append((*map(Tensor.data_ptr, tensors), *map(Tensor.numel, tensors), *views))
    return tuple(found)


def pieces(entry: Sequence[Tensor]) -> tuple[int, list[Tensor]]:
    """The elements of a piece of an entry, and for each of its tensors the addresses of all pieces, in order."""
    shape = entry[0].shape
    outer = len(shape)
    while outer and all(t.stride(outer - 1) == math.prod(shape[outer:]) or shape[outer - 1] == 1 for t in entry):
        outer -= 1
    addresses = []
    for tensor in entry:
        place = torch.tensor(tensor.data_ptr())
        for dim in range(outer):
            steps = torch.arange(shape[dim]) * (tensor.stride(dim) * tensor.element_size())
            place = place[..., None] + steps
        addresses.append(place.reshape(-1))
    return math.prod(shape[outer:]), addresses


class Tables:
    """Makes the parts of lists, and keeps them for the next call with tensors at the same places.

    `chunk` is the number of elements a program takes, `numbers` has the f32 tables: values, each with the number of
    consecutive entries that it is of.
    """

    def __init__(self, chunk: int, numbers: Mapping[str, Sequence[tuple[float, int]]], device: torch.device) -> None:
        self._chunk = chunk
        self._numbers = {name: [value for value, times in runs for _ in range(times)] for name, runs in numbers.items()}
        self._device = device
        self._capturing = torch.cuda.is_current_stream_capturing if device.type == "cuda" else lambda: False
        self._known: dict[Places, tuple[Part, ...]] = {}
        self._captured: dict[Places, tuple[Part, ...]] = {}

    def known(self, key: Places) -> tuple[Part, ...] | None:
        """The parts of lists at these places, if they were made before. Those that a CUDA graph takes are kept for as
        long as this object lives."""
        parts = self._known.get(key, self._captured.get(key))
        if parts is not None and self._capturing():
            self._captured[key] = parts
        return parts

    def make(self, key: Places, lists: Mapping[str, Sequence[Tensor]]) -> tuple[Part, ...] | None:
        """The parts of lists, entries without elements left out; None under the capture of a CUDA graph, when tables
        cannot be copied to the device."""
        if self._capturing():
            return None
        if len(self._known) >= MOST_KEPT:
            self._known.clear()
        parts = self._known[key] = self._make(lists)
        return parts

    def _make(self, lists: Mapping[str, Sequence[Tensor]]) -> tuple[Part, ...]:
        entries = list(zip(*lists.values(), strict=True))
        assert all(len({tensor.shape for tensor in entry}) == 1 for entry in entries), "entries that differ in shape"
        cut = [pieces(entry) for entry in entries]
        items = [tensors[0].element_size() for tensors in lists.values() if tensors]
        even = [
            size % UNIT == 0 and all(not (a % (UNIT * item)).any() for a, item in zip(addresses, items, strict=True))
            for size, addresses in cut
        ]
        parts: list[Part] = []
        for unit in (UNIT, 1):
            chosen = [i for i, entry in enumerate(entries) if entry[0].numel() and even[i] == (unit == UNIT)]
            if chosen:
                before = sum(part.blocks for part in parts)
                places = [torch.cat([cut[i][1][j] for i in chosen]) for j in range(len(lists))]
                tables = {f"{name}_at": at for name, at in zip(lists, map(_behind, places, items), strict=True)}
                entry_of = [i for i in chosen for _ in cut[i][1][0]]
                sizes = torch.tensor([cut[i][0] for i in entry_of])
                parts.append(self._part(tables, sizes, entry_of, unit, before))
        return tuple(parts)

    def _part(
        self, distances: Mapping[str, Tensor], sizes: Tensor, entry_of: Sequence[int], unit: int, before: int
    ) -> Part:
        counts = (sizes + self._chunk - 1) // self._chunk
        owners = torch.repeat_interleave(torch.arange(len(sizes)), counts)
        chunks = torch.arange(len(owners)) - (counts.cumsum(0) - counts)[owners]
        tables = {"owners": owners.int(), "chunks": chunks.int(), "sizes": sizes // unit}
        tables |= {name: distance // unit for name, distance in distances.items()}
        for name, values in self._numbers.items():
            tables[name] = torch.tensor([values[i] for i in entry_of], dtype=torch.float32)
        on_device = {name: table.to(self._device) for name, table in tables.items()}
        return Part(on_device, entry_of[0], unit, len(owners), before)


def _behind(addresses: Tensor, item: int) -> Tensor:
    """How many elements of `item` bytes addresses lie behind the first."""
    return (addresses - addresses[0]) // item
