"""Bytes that this rank hands over to others, counted where they are sent; without `counted` nothing is.

What a CUDA graph sends when it is replayed is not seen: it was counted when it was captured.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Traffic:
    """By kind of collective and axis: bytes, measured as `mgraph collectives` does (what a gather gives, what all
    others take), and calls."""

    bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, kind: str, axis: str, tensors: Sequence[Tensor], ranks: int) -> None:
        """Count one call."""
        size = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors)
        self.bytes[kind, axis] += size * ranks if kind == "all_gather" else size
        self.calls[kind, axis] += 1


_counting: list[Traffic] = []


@contextmanager
def counted() -> Iterator[Traffic]:
    """What is sent meanwhile."""
    traffic = Traffic()
    _counting.append(traffic)
    try:
        yield traffic
    finally:
        _counting.remove(traffic)


def note(kind: str, axis: str, tensors: Sequence[Tensor], ranks: int) -> None:
    """A collective over an axis of several ranks is handed these tensors."""
    for traffic in _counting:
        traffic.add(kind, axis, tensors, ranks)
