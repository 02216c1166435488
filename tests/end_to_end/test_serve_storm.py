"""A small storm over a server of a package in a process of its own; benchmarks/serve_storm.py is the whole one."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.serve_storm import KINDS, run


@pytest.mark.full
def test_nothing_is_lost_in_a_storm(tmp_path: Path) -> None:
    found = run(tmp_path, requests=60, streams=24, seed=3)
    assert set(found["kinds"]) == set(KINDS), "each kind comes"
    assert found["sequences"] >= 24
