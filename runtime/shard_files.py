"""Writes and reads tensors that lie over many ranks, through torch.distributed.checkpoint.

That library agrees between ranks on a plan, writes a file per rank with an index, and, on loading, finds for each box
that is wanted the boxes saved that overlap it: so any mesh reads what any other has written. The planners here tell it
which boxes a rank has; it knows tensors split evenly along whole dims, ours may be padded or split along a factor.

Slow to import, and the only part of a run for which torch itself needs sympy: imported where a checkpoint is written or
read.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save


@dataclass(frozen=True, slots=True)
class Box:
    """A part of the tensor `name`, whose whole has `shape`: it begins at `start`, and `data` has its elements."""

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    data: Tensor

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Where it lies."""
        return ChunkStorageMetadata(torch.Size(self.start), self.data.size())


class _Writing(DefaultSavePlanner):
    """Plans to write the given boxes."""

    def __init__(self, boxes: Iterable[Box]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._boxes = {(box.name, torch.Size(box.start)): box for box in boxes}

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([self._item(box) for box in self._boxes.values()])
        return self.plan

    def _item(self, box: Box) -> WriteItem:
        data = TensorWriteData(box.chunk, TensorProperties.create_from_tensor(box.data), torch.Size(box.shape))
        return WriteItem(MetadataIndex(box.name, torch.Size(box.start)), WriteItemType.SHARD, tensor_data=data)

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        return _find(self._boxes, write_item.index).data


class _Reading(DefaultLoadPlanner):
    """Plans to fill the given boxes."""

    def __init__(self, boxes: Iterable[Box]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._boxes = {(box.name, torch.Size(box.start)): box for box in boxes}

    def create_local_plan(self) -> LoadPlan:
        wanted: dict[str, list[ChunkStorageMetadata]] = {}
        for box in self._boxes.values():
            wanted.setdefault(box.name, []).append(box.chunk)
        items: list[ReadItem] = []
        for name, chunks in wanted.items():
            assert self.metadata is not None, "the index is read before the plan is made"
            saved = self.metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata), f"{name} was not saved as a tensor"
            items += create_read_items_for_chunk_list(name, saved, chunks)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return _find(self._boxes, index).data


def _find(boxes: dict[tuple[str, torch.Size], Box], index: MetadataIndex) -> Box:
    assert index.offset is not None, f"{index.fqn} is asked for without a place"
    return boxes[index.fqn, index.offset]


def write_boxes(boxes: Sequence[Box], path: Path, group: dist.ProcessGroup | None) -> None:
    """Write the boxes of all ranks of `group` to files in `path`. The boxes of a tensor must tile it, each given once.

    A failure is raised as what caused it, on all ranks.
    """
    _run(lambda: save({}, checkpoint_id=path, planner=_Writing(boxes), process_group=group))


def read_boxes(boxes: Sequence[Box], path: Path, group: dist.ProcessGroup | None) -> None:
    """Fill the data of the boxes, in place, from the files in `path`. A failure is raised as by `write_boxes`."""
    _run(lambda: load({}, checkpoint_id=path, planner=_Reading(boxes), process_group=group))


def _run(action: Callable[[], object]) -> None:
    with warnings.catch_warnings():
        # A single process without a process group is what we mean, not a mistake to be warned of.
        warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
        try:
            action()
        except CheckpointException as error:
            causes = [wrapped[0] for wrapped in error.failures.values()]
            raise next((cause for cause in causes if isinstance(cause, OSError)), causes[0]) from error
