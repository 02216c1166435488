"""Small storms over a server in a process of its own; benchmarks/serve_storm.py is the whole one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.serve_storm import KINDS, against, run


def test_nothing_is_lost_in_a_storm_without_a_model() -> None:
    """Engine and server are those of a package; a step takes 5 ms, and what it gives depends on all blocks it reads."""
    command = [sys.executable, "-m", "tests.runtime.serving.fake_server", "0.005", "30"]
    found = against(command, requests=27, streams=6, seed=1)
    assert set(found["kinds"]) == set(KINDS) and sum(found["kinds"].values()) == 27
    assert found["sequences"] >= 18


@pytest.mark.full
def test_nothing_is_lost_in_a_storm(tmp_path: Path) -> None:
    found = run(tmp_path, requests=60, streams=24, seed=3)
    assert set(found["kinds"]) == set(KINDS), "each kind comes"
    assert found["sequences"] >= 24
