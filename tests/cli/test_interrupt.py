"""Ctrl-C while something is imported, which may drop the exception: the process ends with a line and 130."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

IMPORTED = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):
        pass
except BaseException:
    pass
def model():
    raise AssertionError("it went on")
"""


def test_an_import_that_drops_the_exception(tmp_path: Path) -> None:
    (tmp_path / "dropping.py").write_text(IMPORTED, encoding="utf-8")
    command = [sys.executable, "-m", "mgraph", "compile", f"{tmp_path}/dropping.py:model", "-o", f"{tmp_path}/package"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (130, "interrupted")
    assert not (tmp_path / "package").exists()
