"""A process may be killed at any moment of a save: the newest whole checkpoint always loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("count", [6, pytest.param(20, marks=pytest.mark.full)])
def test_the_newest_whole_one_loads(tmp_path: Path, count: int) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.runtime.killed_saves", str(count), str(tmp_path / "checkpoints")],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    steps = json.loads(result.stdout)
    assert len(steps) == count
    assert all(after in (before, before + 1) for before, after in steps)
    assert any(after == before for before, after in steps), "no save was killed in time"
