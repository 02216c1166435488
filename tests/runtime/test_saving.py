"""Saving: the run goes on meanwhile, failures reach it and leave nothing behind, ranks share the work."""

from __future__ import annotations

import errno
import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mgraph.errors import StorageError
from mgraph.runtime import checkpoint, saving, shard_files
from mgraph.runtime.mesh import Mesh
from mgraph.runtime.package import State, StateSpec
from mgraph.runtime.saving import Saver, remove, written_here
from mgraph.runtime.shards import Split
from tests.runtime.resharding import Part

CPU = torch.device("cpu")
ALONE = Mesh(0, 1, CPU, {"dp": 1})
SHAPES = {"w": (7, 5), "b": (3,), "step": ()}
SPECS = tuple(StateSpec(name, "param", torch.float32, shape, True, True, (), name) for name, shape in SHAPES.items())


def state_of(step: int) -> State:
    return {name: torch.full(shape, float(step)) for name, shape in SHAPES.items()}


def values(directory: Path) -> list[float]:
    """The steps of the newest checkpoint: its own, and those that its tensors hold."""
    found = checkpoint.latest(directory)
    assert found is not None
    state = state_of(-1)
    checkpoint.load(found, state, SPECS, ALONE)
    return sorted({float(found.step), *(float(v) for value in state.values() for v in value.flatten())})


class Gate:
    """Stands before a function: calls wait until it is opened."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function, self.reached, self.opened = function, threading.Event(), threading.Event()

    def __call__(self, *arguments: Any) -> None:
        self.reached.set()
        assert self.opened.wait(30)
        self.function(*arguments)


def test_the_run_goes_on_and_changes_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(shard_files.write_boxes)
    monkeypatch.setattr(shard_files, "write_boxes", gate)
    state = state_of(1)
    with Saver(tmp_path, SPECS, ALONE, 2) as saver:
        target = saver.save(1, state, {})
        assert gate.reached.wait(30) and not target.exists()
        for value in state.values():
            value.fill_(2)
        gate.opened.set()
        saver.wait()
        assert target.exists() and values(tmp_path) == [1]
        saver.save(2, state, {})
        for value in state.values():
            value.fill_(3)
        saver.save(3, state, {})  # waits for the one before
        assert checkpoint.whole_ones(tmp_path)[-1].name == "step_00000002"
    assert values(tmp_path) == [3]


def test_leaving_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(shard_files.write_boxes)
    monkeypatch.setattr(shard_files, "write_boxes", gate)
    with pytest.raises(ZeroDivisionError), Saver(tmp_path, SPECS, ALONE, 2) as saver:
        saver.save(1, state_of(1), {})
        threading.Timer(0.1, gate.opened.set).start()
        raise ZeroDivisionError
    assert values(tmp_path) == [1]


@pytest.mark.parametrize("moment", ["tensors", "record"])
def test_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")

    def fail(*arguments: Any) -> None:
        if moment == "tensors":
            arguments[1].mkdir()
            (arguments[1] / "part").write_text("half of it")
        raise full

    saver = Saver(tmp_path, SPECS, ALONE, 2)
    saver.save(1, state_of(1), {})
    saver.wait()
    with monkeypatch.context() as patch:
        patch.setattr(*((shard_files, "write_boxes") if moment == "tensors" else (saving, "_write_durably")), fail)
        saver.save(2, state_of(2), {})
        with pytest.raises(StorageError, match=r"could not be written or read: No space left on device") as caught:
            saver.wait()
    assert caught.value.where == str(tmp_path) and "free some space or give another --out" in str(caught.value.hint)
    assert not saver.failed, "an error is told once"
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"] and values(tmp_path) == [1]
    saver.save(3, state_of(3), {})
    saver.wait()
    assert values(tmp_path) == [3]


def test_a_failure_is_raised_by_the_next_save(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    saver = Saver(tmp_path / "file" / "checkpoints", SPECS, ALONE, 1)
    saver.save(1, state_of(1), {})
    with pytest.raises(StorageError, match=r"Not a directory"):
        saver.save(2, state_of(2), {})


def test_a_failure_beside_another_error_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ZeroDivisionError), Saver(tmp_path / "file" / "checkpoints", SPECS, ALONE, 1) as saver:
        saver.save(1, state_of(1), {})
        raise ZeroDivisionError
    assert "Not a directory" in capsys.readouterr().err


def test_what_a_killed_run_left_goes(tmp_path: Path) -> None:
    for name in ("step_00000007.unfinished", "step_00000003.old.unfinished"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part").write_text("")
    with Saver(tmp_path, SPECS, ALONE, 1) as saver:
        saver.save(8, state_of(8), {})
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000008"]


def test_a_removal_that_stops_half_way_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Saver(tmp_path, SPECS, ALONE, 2) as saver:
        saver.save(1, state_of(1), {})
        saver.save(2, state_of(2), {})

    def fail(path: Path) -> None:
        (path / "run.json").unlink()
        raise OSError("stopped")

    monkeypatch.setattr("mgraph.runtime.saving.shutil.rmtree", fail)
    with pytest.raises(OSError, match="stopped"):
        remove(tmp_path / "step_00000002")
    assert values(tmp_path) == [1]


def test_a_step_that_is_saved_again_is_there_until_the_new_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = Saver(tmp_path, SPECS, ALONE, 2)
    saver.save(1, state_of(1), {})
    saver.wait()
    rename = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path.name == "step_00000001.unfinished":
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    again = {name: value + 1 for name, value in state_of(1).items()}
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail)
        saver.save(1, again, {})
        with pytest.raises(StorageError, match="Input/output error"):
            saver.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"] and values(tmp_path) == [1]
    saver.save(1, again, {})
    saver.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"] and values(tmp_path) == [1, 2]


def test_each_share_is_written_by_one_rank() -> None:
    axes = {"dp": 2, "tp": 3}
    splits = {"whole": (), "split": (Split("tp", 0),), "both": (Split("tp", 0), Split("dp", 1))}
    specs = tuple(
        StateSpec(f"{name}.{layer}", "param", torch.float32, (6, 4), True, True, (), name, placement=placement)
        for layer in range(6)
        for name, placement in splits.items()
    )
    boxes: dict[str, list[tuple[int, ...]]] = {}
    loads = []
    for rank in range(6):
        mesh = Part(rank, 6, CPU, axes)
        mine = written_here(specs, mesh)
        loads.append(len(mine))
        for spec in mine:
            boxes.setdefault(spec.name, []).extend(piece.whole for piece in spec.share(mesh).pieces)
    for spec in specs:
        expected = {
            (): [(0, 0)],
            splits["split"]: [(0, 0), (2, 0), (4, 0)],
            splits["both"]: list(itertools.product((0, 2, 4), (0, 2))),
        }[spec.placement]
        assert sorted(boxes[spec.name]) == expected
    assert loads == [1 + 3 + 6] * 6
