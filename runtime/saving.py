"""Write checkpoints while the run goes on, each whole or not at all.

`Saver.save` copies the state to the host, which is all that the run waits for, and hands the copy to a thread. One save
is in flight at a time: the next one waits for it. What goes wrong in the thread is raised, the same error on all ranks,
by the next `save` or `wait`; `failed` says that there is something to be raised. Leaving the saver waits, too.

Each part of the state is copied and written by one rank only, of those that have it: where all ranks have the whole
state, each writes its share of the tensors.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mgraph.errors import MgraphError, StorageError
from mgraph.runtime.checkpoint import RUN_FILE, UNFINISHED, digest, layout_of, storage, whole_ones
from mgraph.runtime.mesh import Mesh
from mgraph.runtime.package import State, StateSpec

if TYPE_CHECKING:
    from mgraph.runtime.shard_files import Box


class Saver:
    """Writes the checkpoints of a run into `directory`, and keeps the last `keep` of them. All ranks act together."""

    def __init__(self, directory: Path, specs: tuple[StateSpec, ...], mesh: Mesh, keep: int) -> None:
        self._directory, self._mesh, self._keep = directory, mesh, keep
        self._specs = tuple(spec for spec in specs if spec.persist)
        self._mine = {spec.name for spec in written_here(self._specs, mesh)}
        self._beside: Mesh | None = None
        self._copies: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the save in flight; not after Ctrl-C, and beside another error its own is only told."""
        if kind is None:
            self.wait()
        elif not issubclass(kind, KeyboardInterrupt):
            try:
                self.wait()
            except MgraphError as failure:
                if self._mesh.is_first:
                    print(failure, file=sys.stderr, flush=True)

    @property
    def failed(self) -> bool:
        """Whether the last save has failed, and nobody was told yet. Ranks may see it at different moments."""
        return self._failure is not None

    def save(self, step: int, state: State, run: dict[str, Any]) -> Path:
        """Begin to write the persistent state and the JSON-able `run` as the checkpoint of `step`; where it will be.

        The state may change as soon as this returns. Raises what the save before failed with, on all ranks: a
        `StorageError` if the disk is full or refuses. A failed save leaves nothing half-written behind.
        """
        self.wait()
        if self._beside is None:
            self._beside = self._mesh.beside()
        boxes = self._stage(state)
        target = self._directory / f"step_{step:08d}"
        record = {"step": step, "run": run, "layout": layout_of(self._specs)}
        # A daemon: an interrupted run ends without waiting for it.
        self._thread = threading.Thread(
            target=self._write, args=(boxes, target, record, self._beside), name="checkpoint", daemon=True
        )
        self._thread.start()
        return target

    def wait(self) -> None:
        """Wait until no save is in flight. Raises what it failed with, on all ranks."""
        if self._thread is None:
            return
        self._thread.join()
        failure, self._thread, self._failure = self._failure, None, None
        if failure is not None:
            raise failure

    def _stage(self, state: State) -> list[Box]:
        """Copies of what this rank writes. Their memory is kept for the next save: pinning it is slow."""
        from mgraph.runtime.shard_files import Box

        boxes = []
        if self._mesh.device.type == "cuda":  # what the host has of the state may be under way to it
            torch.cuda.current_stream(self._mesh.device).synchronize()
        for spec in self._specs:
            if spec.name not in self._mine:
                continue
            share, local = spec.share(self._mesh), state[spec.name]
            assert tuple(local.shape) == share.shape, f"{spec.name} is {tuple(local.shape)}, its share {share.shape}"
            for piece in share.pieces:
                part, key = piece.of(local).detach(), (spec.name, piece.whole)
                if key not in self._copies:
                    self._copies[key] = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
                self._copies[key].copy_(part, non_blocking=True)
                boxes.append(Box(spec.name, spec.shape, piece.whole, self._copies[key]))
        if self._mesh.device.type == "cuda":
            torch.cuda.current_stream(self._mesh.device).synchronize()
        return boxes

    def _write(self, boxes: list[Box], target: Path, record: dict[str, Any], mesh: Mesh) -> None:
        """The thread: whatever fails is kept for the run."""
        unfinished = target.with_name(target.name + UNFINISHED)
        try:
            self._write_whole(boxes, target, unfinished, record, mesh)
        except BaseException as error:
            if mesh.is_first and isinstance(error, StorageError):
                shutil.rmtree(unfinished, ignore_errors=True)
            self._failure = error

    def _write_whole(
        self, boxes: list[Box], target: Path, unfinished: Path, record: dict[str, Any], mesh: Mesh
    ) -> None:
        from mgraph.runtime.shard_files import write_boxes

        def prepare() -> None:
            self._directory.mkdir(parents=True, exist_ok=True)
            if mesh.is_first:  # nothing else is in flight: what is unfinished was left by a killed run
                for left in self._directory.glob(f"*{UNFINISHED}"):
                    shutil.rmtree(left)

        def own_digests() -> dict[str, str]:
            files = [*unfinished.glob(f"__{mesh.rank}_*"), *([unfinished / ".metadata"] if mesh.is_first else [])]
            return {file.name: digest(file) for file in sorted(files)}

        def publish() -> None:
            if not mesh.is_first:
                return
            written = {name: found for of_rank in digests for name, found in of_rank.items()}
            _write_durably(unfinished / RUN_FILE, json.dumps({**record, "files": written}, indent=1))
            _sync(unfinished)
            replace(target, unfinished)
            _sync(self._directory)
            for old in whole_ones(self._directory)[: -self._keep]:
                remove(old)

        mesh.together(lambda: storage(self._directory, prepare))
        mesh.together(lambda: storage(self._directory, lambda: write_boxes(boxes, unfinished, mesh.host)))
        digests = mesh.gather(mesh.together(lambda: storage(self._directory, own_digests)))
        mesh.together(lambda: storage(self._directory, publish))


def written_here(specs: tuple[StateSpec, ...], mesh: Mesh) -> list[StateSpec]:
    """Those states whose share this rank writes: of the ranks that have the same share, one, and each about as much."""
    written = []
    loads: dict[tuple[str, ...], list[int]] = {}
    for spec in specs:
        split = {one.axis for one in spec.placement}
        same = tuple(axis for axis in mesh.axes if axis not in split)
        load = loads.setdefault(same, [0] * math.prod(map(mesh.size, same)))
        writer = load.index(min(load))
        load[writer] += spec.bytes
        own = 0
        for axis in same:
            own = own * mesh.size(axis) + mesh.index(axis)
        if writer == own:
            written.append(spec)
    return written


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint so that at no moment a part of it has its name."""
    shutil.rmtree(_set_aside(checkpoint))


def replace(checkpoint: Path, written: Path) -> None:
    """Give `written` the name of a checkpoint. One that has it stays until then, and for good if that fails."""
    if not checkpoint.exists():
        written.rename(checkpoint)
        return
    doomed = _set_aside(checkpoint)
    try:
        written.rename(checkpoint)
    except OSError:
        doomed.rename(checkpoint)
        raise
    shutil.rmtree(doomed)


def _set_aside(checkpoint: Path) -> Path:
    return checkpoint.rename(checkpoint.with_name(checkpoint.name + ".old" + UNFINISHED))


def _write_durably(file: Path, text: str) -> None:
    """Write and flush to the disk, so that the rename that follows cannot overtake the content."""
    with file.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _sync(directory: Path) -> None:
    """Flush the names of a directory to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
