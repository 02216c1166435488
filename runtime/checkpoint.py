"""Save a run whole, or not at all, and find it again.

A checkpoint is a directory `step_00000120` with the tensors as torch.distributed.checkpoint writes them and a run.json:
the step, the position in the data, the options, the layout of the state (names, dtypes, shapes) and the SHA-256 of
every file. It is written under another name and renamed at the end, so a directory with the final name is whole: a
kill, a full disk or a crash at any moment leaves the checkpoints before it as they were.

All ranks save and load together and need one file system that all see.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from mgraph.errors import CheckpointError, StorageError, storage_hint
from mgraph.runtime.mesh import Mesh
from mgraph.runtime.package import DTYPES, State, StateSpec

_NAME = re.compile(r"step_(\d{8,})")
_UNFINISHED = ".unfinished"
_FEW = 5
_SAME_RUN = "resume with the package and options that wrote it, or start anew in another --out"
_RUN_FILE = "run.json"
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk: its path, and what run.json says beside the tensors."""

    path: Path
    step: int
    run: dict[str, Any]
    layout: dict[str, str]
    files: dict[str, str]


def layout_of(specs: tuple[StateSpec, ...]) -> dict[str, str]:
    """What must agree between a checkpoint and a package: persistent state by name, as `f32[64, 64]`."""
    return {spec.name: f"{_DTYPE_NAMES[spec.dtype]}{list(spec.shape)}" for spec in specs if spec.persist}


def save(
    directory: Path, step: int, state: State, specs: tuple[StateSpec, ...], run: dict[str, Any], mesh: Mesh, keep: int
) -> Path:
    """Write the persistent state and the JSON-able `run` as the checkpoint of `step`; keep the last `keep` checkpoints.

    Raises `StorageError` on all ranks, with nothing half-written left behind, if the disk is full or refuses.
    """
    target = directory / f"step_{step:08d}"
    unfinished = target.with_name(target.name + _UNFINISHED)
    layout = layout_of(specs)
    tensors = {name: state[name] for name in layout}
    if mesh.is_first:
        shutil.rmtree(unfinished, ignore_errors=True)

    def write_run() -> None:
        if not mesh.is_first:
            return
        files = {file.name: _digest(file) for file in sorted(unfinished.iterdir())}
        record = {"step": step, "run": run, "layout": layout, "files": files}
        _write_durably(unfinished / _RUN_FILE, json.dumps(record, indent=1))
        shutil.rmtree(target, ignore_errors=True)
        unfinished.rename(target)

    try:
        mesh.together(lambda: _storage(directory, lambda: directory.mkdir(parents=True, exist_ok=True)))
        mesh.together(lambda: _storage(directory, lambda: _dcp("save", tensors, unfinished)))
        mesh.together(lambda: _storage(directory, write_run))
    except StorageError:
        if mesh.is_first:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise
    if mesh.is_first:
        for old in _whole(directory)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    return target


def latest(directory: Path) -> Checkpoint | None:
    """The newest whole checkpoint in `directory`, or None. Raises `CheckpointError` if its run.json is damaged."""
    whole = _whole(directory)
    if not whole:
        return None
    file = whole[-1] / _RUN_FILE
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        return Checkpoint(whole[-1], record["step"], record["run"], record["layout"], record["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(whole[-1], f"{_RUN_FILE}: {error}") from error


def load(checkpoint: Checkpoint, state: State, specs: tuple[StateSpec, ...], mesh: Mesh) -> None:
    """Fill the persistent tensors of `state`, in place. Raises `CheckpointError` if layout or content do not fit."""
    layout = layout_of(specs)
    check_same(checkpoint.layout, layout, checkpoint.path, "state")
    # The ranks share the work of reading: a file is checked by one of them.
    mesh.together(lambda: _verify(checkpoint, list(checkpoint.files)[mesh.rank :: mesh.world_size]))
    tensors = {name: state[name] for name in layout}
    mesh.together(lambda: _storage(checkpoint.path, lambda: _dcp("load", tensors, checkpoint.path)))


def load_parameters(checkpoint: Checkpoint, state: State, specs: tuple[StateSpec, ...]) -> None:
    """Fill the persistent tensors of `specs` alone, in one process: the weights of a run, for another package.

    Raises `CheckpointError` where the checkpoint lacks one, has it in another shape, or is damaged.
    """
    layout = layout_of(specs)
    saved = {name: kept for name, kept in checkpoint.layout.items() if name in layout}
    check_same(saved, layout, checkpoint.path, "state", "take a run of the model that this package was compiled from")
    _verify(checkpoint, list(checkpoint.files))
    tensors = {name: state[name] for name in layout}
    _storage(checkpoint.path, lambda: _dcp("load", tensors, checkpoint.path))


def _verify(checkpoint: Checkpoint, names: list[str]) -> None:
    """Raise `CheckpointError` unless these files are what was written."""
    for name in names:
        file = checkpoint.path / name
        if not file.is_file() or _digest(file) != checkpoint.files[name]:
            raise _damaged(checkpoint.path, f"{name} is {'not what was written' if file.exists() else 'missing'}")


def check_same(saved: Mapping[str, Any], now: Mapping[str, Any], path: Path, what: str, hint: str = _SAME_RUN) -> None:
    """Raise `CheckpointError` naming the fields in which two records differ, of many the first."""
    names = [name for name in {**now, **saved} if saved.get(name) != now.get(name)]
    if names:
        parts = [
            f"{what} '{name}' is {saved.get(name, 'absent')} in it and {now.get(name, 'absent')} here"
            for name in names[:_FEW]
        ]
        more = f"; and {len(names) - _FEW} more" if len(names) > _FEW else ""
        raise CheckpointError(
            f"the checkpoint does not fit this run: {'; '.join(parts)}{more}", where=str(path), hint=hint
        )


def _whole(directory: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    found = [(int(match[1]), path) for path in directory.glob("step_*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def _dcp(verb: str, tensors: dict[str, Tensor], path: Path) -> None:
    """`save` or `load` of torch.distributed.checkpoint; a failure is raised as what caused it, on all ranks."""
    # Slow to import, and the only part of a run for which torch itself needs sympy.
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings():
        # A single process without a process group is what we mean, not a mistake to be warned of.
        warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
        try:
            getattr(dcp, verb)(tensors, checkpoint_id=path)
        except CheckpointException as error:
            causes = [wrapped[0] for wrapped in error.failures.values()]
            raise next((cause for cause in causes if isinstance(cause, OSError)), causes[0]) from error


def _storage(place: Path, action: Callable[[], None]) -> None:
    """Run `action`, turning a failure of the file system into a `StorageError`."""
    try:
        action()
    except (OSError, RuntimeError) as error:  # torch's writer reports a short write as a RuntimeError
        raise _storage_error(place, error) from error


def _storage_error(place: Path, failure: OSError | RuntimeError) -> StorageError:
    reason = getattr(failure, "strerror", None) or str(failure).splitlines()[0]
    return StorageError(
        f"the checkpoint could not be written or read: {reason}",
        where=str(place),
        hint=f"{storage_hint(failure)} --out; checkpoints written before are untouched",
    )


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint is damaged: {reason}",
        where=str(path),
        hint="remove this directory to resume from the checkpoint before it",
    )


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write_durably(file: Path, text: str) -> None:
    """Write and flush to the disk, so that the rename that follows cannot overtake the content."""
    with file.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
