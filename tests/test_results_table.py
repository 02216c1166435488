"""The committed table of the suite is complete and green. It says which markers were selected."""

from __future__ import annotations

from tests import results_table


def test_round_trip() -> None:
    counts = {"tests/a/test_b.py": [3, 0, 1], "tests/test_c.py": [1, 2, 0]}
    text = results_table.render(counts, "not gpu")
    assert results_table.read(text) == {name: tuple(row) for name, row in counts.items()}
    assert "| total | 4 | 2 | 1 |" in text


def test_every_test_file_passed_in_the_last_run() -> None:
    rows = results_table.read(results_table.TABLE.read_text(encoding="utf-8"))
    missing = [name for name in results_table.test_files() if name not in rows]
    assert not missing, f"run `make test-full` and commit docs/test-results.md; not in it: {missing}"
    failed = {name: row for name, row in rows.items() if row[1]}
    assert not failed, f"the last run had failures: {failed}"
    empty = [name for name, row in rows.items() if sum(row) == 0]
    assert not empty, f"no test ran in {empty}"
