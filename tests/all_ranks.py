"""All ranks of a mesh in one process: tensors laid out by their placements, put together again, and what ranks send."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mgraph.ir.local import part
from mgraph.ir.types import Partial, Placement, Shard, TensorType

Tensors = dict[str, Any]


def places(sizes: Mapping[str, int]) -> list[dict[str, int]]:
    """The coordinates of each rank by axis, the first axis major."""
    return [dict(zip(sizes, at, strict=True)) for at in itertools.product(*map(range, sizes.values()))]


def laid_out(tensor: Any, type_: TensorType, sizes: Mapping[str, int]) -> list[Any]:
    """What each rank holds of a tensor; of what is partial the first rank of an axis has all, the others zeros."""
    partial = [axis for axis, place in type_.placement if isinstance(place, Partial)]
    return [
        part(tensor if all(at[axis] == 0 for axis in partial) else torch.zeros_like(tensor), type_, sizes, at)
        for at in places(sizes)
    ]


def joined(ranks: Sequence[Any], type_: TensorType, sizes: Mapping[str, int]) -> Any:
    """The tensor that ranks hold parts of. Along an axis over which it does not lie, they must hold the same."""
    placed = dict(type_.placement)
    held = dict(zip(itertools.product(*map(range, sizes.values())), ranks, strict=True))
    # The last split is of what the ones before left.
    for axis in [*(a for a in sizes if a not in placed), *reversed(placed)]:
        index = list(sizes).index(axis)
        groups: dict[tuple[int, ...], list[Any]] = {}
        for at, tensor in held.items():
            groups.setdefault((*at[:index], 0, *at[index + 1 :]), []).append(tensor)
        held = {at: _together(group, placed.get(axis)) for at, group in groups.items()}
    (tensor,) = held.values()
    return tensor


def _together(group: Sequence[Any], placement: Placement | None) -> Any:
    if isinstance(placement, Shard):
        return torch.cat(list(group), placement.dim)
    if isinstance(placement, Partial):
        return torch.stack(list(group)).sum(0)
    for other in group[1:]:
        assert difference(group[0], other) <= 1e-12, "ranks hold different tensors where they must hold the same"
    return group[0]


def difference(expected: Any, found: Any, least: float = 1e-6) -> float:
    """The largest difference, relative to the largest element; `least` is the smallest that counts as one."""
    assert expected.shape == found.shape, f"{tuple(expected.shape)} became {tuple(found.shape)}"
    if not expected.numel():
        return 0.0
    scale = max(float(expected.double().abs().max()), least)
    return float((expected.double() - found.double()).abs().max()) / scale
