"""The table of a whole test run: `pytest --table FILE` writes it, and the fast suite checks the committed one."""

from __future__ import annotations

import datetime
import platform
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs" / "test-results.md"
_ROW = re.compile(r"^\| `(tests/[^`]+)` \| (\d+) \| (\d+) \| (\d+) \|$", re.MULTILINE)


def render(counts: dict[str, list[int]], selection: str) -> str:
    """The table of passed, failed and skipped tests per file, with date, commit, versions and the markers selected."""
    import torch

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    lines = [
        "# Results of the test suite",
        "",
        f"`pytest -m '{selection}'` on {datetime.date.today().isoformat()}, "
        f"commit {commit.stdout.strip() or 'unknown'}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, no GPU. Written by the run itself.",
        "",
        "| file | passed | failed | skipped |",
        "|---|---|---|---|",
    ]
    lines += [f"| `{name}` | {p} | {f} | {s} |" for name, (p, f, s) in sorted(counts.items())]
    total = [sum(column) for column in zip(*counts.values(), strict=True)]
    lines.append(f"| total | {total[0]} | {total[1]} | {total[2]} |")
    return "\n".join(lines) + "\n"


def read(text: str) -> dict[str, tuple[int, int, int]]:
    """Passed, failed and skipped per file, of a rendered table."""
    return {name: (int(p), int(f), int(s)) for name, p, f, s in _ROW.findall(text)}


def test_files() -> Iterable[str]:
    """Every test file of the checkout, as the table names it; but for test_gpu.py, which needs a GPU throughout."""
    found = (path for path in (ROOT / "tests").rglob("test_*.py") if path.name != "test_gpu.py")
    return sorted(path.relative_to(ROOT).as_posix() for path in found)
