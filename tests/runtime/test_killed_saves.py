"""A process may be killed at any moment of a save: the newest whole checkpoint always loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def killed(how: str, count: int, directory: Path) -> list[list[int]]:
    """What a script of saves that are killed prints."""
    result = subprocess.run(
        [sys.executable, "-m", f"tests.runtime.{how}", str(count), str(directory)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    rows: list[list[int]] = json.loads(result.stdout)
    assert len(rows) == count
    return rows


@pytest.mark.parametrize("count", [6, pytest.param(20, marks=pytest.mark.full)])
def test_the_newest_whole_one_loads(tmp_path: Path, count: int) -> None:
    steps = killed("killed_saves", count, tmp_path / "checkpoints")
    assert all(after in (before, before + 1) for before, after in steps)
    assert any(after == before for before, after in steps), "no save was killed in time"


@pytest.mark.parametrize("count", [4, pytest.param(20, marks=pytest.mark.full)])
def test_one_of_two_processes_is_killed(tmp_path: Path, count: int) -> None:
    rows = killed("killed_pairs", count, tmp_path / "checkpoints")
    assert all(after in (before, before + 1) for _, before, after in rows)
    assert {rank for rank, before, after in rows if after == before} == {0, 1}, "no save was killed in time"
