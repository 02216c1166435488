"""The record of a run: resumable, and clear where it cannot be written."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mgraph.errors import StorageError
from mgraph.runtime.log import Log, Record


def record(step: int) -> Record:
    return {"step": step, "loss": 1.0 / step, "learning_rate": 0.1, "tokens_per_second": 10.0}


def lines(directory: Path) -> list[Record]:
    return [json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines()]


def test_records_points_and_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = Log(tmp_path, 0, 3)
    log.train([record(1), record(2)])
    log.validation(2, 0.75)
    log.train([record(3)])
    log.close()
    assert lines(tmp_path) == [record(1), record(2), {"step": 2, "validation_loss": 0.75}, record(3)]
    assert log.points("loss") == [(1, 1.0), (2, 0.5), (3, 1 / 3)] and log.points("validation_loss") == [(2, 0.75)]
    assert "step 2/3  loss 0.5000" in capsys.readouterr().err

    from tensorboard.backend.event_processing import event_accumulator  # type: ignore[import-untyped]

    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    assert [e.value for e in events.Scalars("validation/loss")] == [0.75]


def test_resume_cuts_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    log = Log(tmp_path, 0, 9)
    log.train([record(step) for step in range(1, 8)])
    log.close()
    with (tmp_path / "log.jsonl").open("a") as stream:
        stream.write('{"step": 8, "lo')  # a crash in the middle of a line
    log = Log(tmp_path, 4, 9)
    assert lines(tmp_path) == [record(step) for step in range(1, 5)]
    log.train([record(5)])
    log.close()
    assert [point[0] for point in log.points("loss")] == [1, 2, 3, 4, 5]
    Log(tmp_path, 0, 9).close()
    assert lines(tmp_path) == []


def test_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="log of the run cannot be written: Not a directory"):
        Log(tmp_path / "file" / "run", 0, 1)


def test_without_matplotlib_there_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    log = Log(tmp_path, 0, 1)
    assert log.picture(3.0, "name") is None
    log.close()
    assert capsys.readouterr().err.splitlines() == [
        "warning: no loss curve: matplotlib is not installed (pip install matplotlib)"
    ]
