"""Set-up of every test: reproducible, without the network, and no model captured twice."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import mgraph.capture
import mgraph.compiler
from tests import captures, results_table

# Before any import of transformers: its configurations must never be looked up online.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Graphs are many small objects that stay: as often as it runs by itself, the collector takes a sixth of the time.
gc.set_threshold(50_000, 20, 10)

# Here, and not in a fixture, so that builds of a session share captures, too.
for user in (mgraph.capture, mgraph.compiler):
    user.capture_with_report = captures.shared  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Each test draws the same numbers, whatever ran before it."""
    torch.manual_seed(0)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--table FILE` writes the results per test file."""
    parser.addoption("--table", type=Path, help="write a table of the results per test file")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Write the table, once, where the results of all workers are known."""
    target = config.getoption("--table")
    if target is None:
        return
    counts: dict[str, list[int]] = {}
    for outcome, column in (("passed", 0), ("failed", 1), ("error", 1), ("skipped", 2)):
        for report in terminalreporter.stats.get(outcome, []):
            counts.setdefault(report.nodeid.partition("::")[0], [0, 0, 0])[column] += 1
    target.write_text(results_table.render(counts, config.option.markexpr), encoding="utf-8")
