"""What a checkpoint is, how it is found again, and loaded: on any mesh, whatever mesh wrote it.

A checkpoint is a directory `step_00000120` with the tensors as torch.distributed.checkpoint writes them and a run.json:
the step, the position in the data, the options, the layout of the state (names, dtypes, shapes of whole tensors) and
the SHA-256 of every file. It holds parameters, optimizer state and buffers; random numbers are functions of the seed
and the step, so a generator has no state to be saved. It is written under another name and renamed at the end
(`saving.py`), and renamed again before it is removed, so a directory with the final name is whole: a kill, a full disk
or a crash at any moment leaves the other checkpoints as they were.

All ranks load together and need one file system that all see. Each reads its own part of the state.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mgraph.adapters import adapter_names
from mgraph.errors import CheckpointError, StorageError, storage_hint
from mgraph.runtime.mesh import ALONE, Mesh
from mgraph.runtime.package import DTYPES, State, StateSpec

T = TypeVar("T")

UNFINISHED = ".unfinished"
"""Behind the name of a directory that is being written or removed."""

RUN_FILE = "run.json"

_NAME = re.compile(r"step_(\d{8,})")
_FEW = 5
_SAME_RUN = "resume with the package and options that wrote it, or start anew in another --out"
_OF_A_PARAMETER = (".m", ".v", ".master")
"""Behind the name of a parameter: what an optimizer keeps of it."""
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_TIMES = " times "


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk: its path, and what run.json says beside the tensors."""

    path: Path
    step: int
    run: dict[str, Any]
    layout: dict[str, str]
    files: dict[str, str]


def layout_of(specs: tuple[StateSpec, ...]) -> dict[str, str]:
    """What must agree between a checkpoint and a package: persistent state by name, as `f32[64, 64]`; of an adapter's B
    also the factor, as `f32[64, 8] times 2`."""
    factors = {adapter_names(s.name)[1]: f"{_TIMES}{s.adapter.scale:.9g}" for s in specs if s.adapter is not None}
    return {s.name: f"{_DTYPE_NAMES[s.dtype]}{list(s.shape)}{factors.get(s.name, '')}" for s in specs if s.persist}


def _expected(checkpoint: Checkpoint, specs: tuple[StateSpec, ...]) -> dict[str, str]:
    """`layout_of`, without the factors of adapters that an older checkpoint does not tell."""
    told = {name for name, text in checkpoint.layout.items() if _TIMES in text}
    return {name: text if name in told else text.partition(_TIMES)[0] for name, text in layout_of(specs).items()}


def latest(directory: Path) -> Checkpoint | None:
    """The newest whole checkpoint in `directory`, or None. Raises `CheckpointError` if its run.json is damaged."""
    whole = whole_ones(directory)
    if not whole:
        return None
    file = whole[-1] / RUN_FILE
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        return Checkpoint(whole[-1], record["step"], record["run"], record["layout"], record["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(whole[-1], f"{RUN_FILE}: {error}") from error


def load(checkpoint: Checkpoint, state: State, specs: tuple[StateSpec, ...], mesh: Mesh) -> None:
    """Fill this rank's persistent tensors of `state`, in place.

    Raises `CheckpointError` if layout or content do not fit.
    """
    check_same(checkpoint.layout, _expected(checkpoint, specs), checkpoint.path, "state")
    _read_verified(checkpoint, state, specs, mesh)


def load_parameters(checkpoint: Checkpoint, state: State, specs: tuple[StateSpec, ...], mesh: Mesh = ALONE) -> None:
    """Fill this rank's shares of the persistent tensors of `specs` alone: the weights of a run, for another package.

    Raises `CheckpointError`, on all ranks, where the checkpoint lacks one, has another shape or weights besides, or is
    damaged.
    """
    layout = _expected(checkpoint, specs)
    saved = {name: kept for name, kept in checkpoint.layout.items() if name in layout}
    shapes = [{name: kept[kept.index("[") :] for name, kept in each.items()} for each in (saved, layout)]
    hint = "take a run of the model that this package was compiled from"
    if shapes[0] == shapes[1]:
        hint = "compile for serving with the --precision of the run, or --export the run's weights, which are converted"
    check_same(saved, layout, checkpoint.path, "state", hint)
    besides = [name for name in weights_in(checkpoint.layout) if name not in layout]
    if besides:
        more = f" and {len(besides) - _FEW} more" if len(besides) > _FEW else ""
        raise CheckpointError(
            f"the run has weights that this package has not: {', '.join(besides[:_FEW])}{more}",
            where=str(checkpoint.path),
            hint="compile the package from the model of the run, with its --lora if it has one, or give the weights "
            "that train.py --resume --export DIR writes, into which adapters are merged",
        )
    _read_verified(checkpoint, state, specs, mesh)


def weights_in(layout: Mapping[str, str]) -> list[str]:
    """The names of a checkpoint's parameters and buffers: all that is neither the optimizer's nor a single number."""
    kept = {name + suffix for name in layout for suffix in _OF_A_PARAMETER}
    return [name for name, kind in layout.items() if name not in kept and not kind.endswith("[]")]


def _read_verified(checkpoint: Checkpoint, state: State, specs: tuple[StateSpec, ...], mesh: Mesh) -> None:
    # The ranks share the work of reading: a file is checked by one of them.
    mesh.together(lambda: _verify(checkpoint, list(checkpoint.files)[mesh.rank :: mesh.world_size]))
    mesh.together(lambda: _read(checkpoint, state, specs, mesh))


def _read(checkpoint: Checkpoint, state: State, specs: tuple[StateSpec, ...], mesh: Mesh) -> None:
    from mgraph.runtime.shard_files import Box, read_boxes

    boxes = []
    for spec in specs:
        if not spec.persist:
            continue
        share, local = spec.share(mesh), state[spec.name]
        assert tuple(local.shape) == share.shape, f"{spec.name} is {tuple(local.shape)}, its share {share.shape}"
        boxes += [Box(spec.name, spec.shape, piece.whole, piece.of(local)) for piece in share.pieces]
    storage(checkpoint.path, lambda: read_boxes(boxes, checkpoint.path, mesh.host))


def _verify(checkpoint: Checkpoint, names: list[str]) -> None:
    """Raise `CheckpointError` unless these files are what was written."""
    for name in names:
        file = checkpoint.path / name
        if not file.is_file() or digest(file) != checkpoint.files[name]:
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


def whole_ones(directory: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    found = [(int(match[1]), path) for path in directory.glob("step_*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def storage(place: Path, action: Callable[[], T]) -> T:
    """Run `action`, turning a failure of the file system into a `StorageError`."""
    try:
        return action()
    except (OSError, RuntimeError) as error:  # torch's writer reports a short write as a RuntimeError
        raise _storage_error(place, error) from error


def _storage_error(place: Path, failure: OSError | RuntimeError) -> StorageError:
    reason = getattr(failure, "strerror", None) or str(failure).splitlines()[0]
    if isinstance(failure, RuntimeError) and "unexpected pos" in reason:  # torch's writer, of fewer bytes than it gave
        reason = "not all of it could be written, as on a disk that is full"
    return StorageError(
        f"the checkpoint could not be written or read: {reason}",
        where=str(place),
        hint=f"{storage_hint(failure)} --out; checkpoints written before are untouched",
    )


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint is damaged: {reason}",
        where=str(path),
        hint="remove this directory, and the checkpoint before it is taken",
    )


def digest(file: Path) -> str:
    """The SHA-256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
