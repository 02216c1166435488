"""Rows of results: how they are made, that every committed one has the fields that all have, and that the list of
benchmarks says where each comes from."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.__main__ import BENCHMARKS, ON_A_GPU, RESULTS
from benchmarks.gpu import rows

FILES = sorted(RESULTS.glob("*.jsonl"))


@pytest.mark.parametrize(("unit", "best", "ratio"), [("seconds", "b", 1.5), ("tokens/s", "a", 0.5)])
def test_a_row_names_the_best_of_its_peers(unit: str, best: str, ratio: float) -> None:
    made = rows.row("K1", "a copy", 2.0, unit, {"a": 4.0, "b": 3.0}, {"a": {"error": 0.0}}, fraction=0.9)
    assert (made["peer_name"], made["peer"], made["ratio"]) == (best, made["peers"][best], ratio)
    assert (made["of_peers"], made["fraction"]) == ({"a": {"error": 0.0}}, 0.9)


def test_a_row_without_peers_compares_nothing() -> None:
    assert set(rows.row("K1", "a copy", 2.0, "seconds")) == {"id", "workload", "ours", "unit"}


def test_a_file_gets_a_line_with_card_versions_and_date(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    for ours in (1.0, 2.0):
        rows.append(file, rows.row("K1", "a copy", ours, "seconds"))
    found = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    assert [row["ours"] for row in found] == [1.0, 2.0]
    assert all(set(row) == set(rows.ALWAYS) for row in found)
    assert found[0]["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_committed_rows_have_one_form(file: Path) -> None:
    for number, line in enumerate(file.read_text("utf-8").splitlines(), 1):
        row: dict[str, Any] = json.loads(line)
        where = f"{file.name}:{number}"
        missing = [name for name in rows.ALWAYS if row.get(name) in (None, "")]
        assert not missing, f"{where} has no {', '.join(missing)}: add rows with benchmarks.gpu.rows"
        assert row["unit"] in rows.UNITS and row["versions"]["torch"], where
        assert math.isfinite(row["ours"]) and row["ours"] >= 0, where
        assert ("fraction" in row) == ("limit" in row), where
        assert row.get("limit") not in ("copy", "matmul") or row[row["limit"]] > 0, where
        compared = rows.row("", "", row["ours"], row["unit"], row.get("peers"), row.get("of_peers"))
        for name in ("peer", "peer_name", "ratio", "of_peers"):
            assert row.get(name) == compared.get(name), f"{where}: {name}"
        assert set(row.get("of_peers", {})) <= set(row.get("peers", {})), where


def programs(folder: str) -> set[str]:
    """Modules that can be run."""
    files = (RESULTS.parent / folder).glob("*.py")
    return {file.stem for file in files if '__name__ == "__main__"' in file.read_text(encoding="utf-8")}


def test_every_program_is_listed() -> None:
    assert {*BENCHMARKS} == programs("") - {"__main__"}
    named = {name for command in ON_A_GPU.values() for name in re.findall(r"benchmarks\.gpu\.(\w+)", command)}
    assert named == programs("gpu")


def test_results_are_of_the_newest_card_that_there_are_any_of() -> None:
    there = {file.stem for file in RESULTS.iterdir()}
    of_cards = [name for name in ON_A_GPU if re.search(r"_h\d+$", name)]
    assert of_cards and there.issuperset(of_cards)
    assert not [name for name in of_cards if name.endswith("_h100") and name.replace("_h100", "_h200") in there]
