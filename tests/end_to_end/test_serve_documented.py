"""What docs/serving.md begins with, as it is written there: from a model definition to streamed text."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parents[2] / "docs" / "serving.md"
STEPS = ["--steps", "3", "--batch-size", "2", "--seq-len", "32"]


@pytest.mark.full
def test_the_sequence_of_the_documentation(tmp_path: Path) -> None:
    """`make demo` is run with few steps and one process; all else is taken from the blocks of the document."""
    document = DOCUMENT.read_text("utf-8").replace("build/", f"{tmp_path}/build/").replace("runs/", f"{tmp_path}/runs/")
    shell, _, with_client, alone = re.findall(r"^```\w*\n(.*?)^```", document, re.M | re.S)[:4]
    demo, compiling, serving = [shlex.split(line, comments=True) for line in shell.splitlines()]
    assert demo == ["make", "demo"] and "openai" in with_client and "LLM" in alone
    program = [sys.executable, "-m"]
    package = tmp_path / "train"
    trained = [*program, "mgraph", "compile", "moe-demo", "--for", "train", "--target", "cpu", "-o", str(package)]
    subprocess.run(trained, check=True, timeout=60)
    run = [sys.executable, str(package / "train.py"), "--out", str(tmp_path / "runs" / "demo"), *STEPS]
    subprocess.run(run, check=True, timeout=60)
    subprocess.run([*program, *compiling], check=True, timeout=60)
    with subprocess.Popen([*program, *serving, "--port", "0"], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            assert line.startswith("serving moe-demo-serve at http://127.0.0.1:"), line
            streamed = said(with_client.replace("http://127.0.0.1:8000", line.split()[-1]))
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert 80 <= len(streamed.encode()) <= 3 * 80, "80 bytes, of which some may be no text"
    assert len(said(alone).encode()) >= 80


def said(program: str) -> str:
    """What a piece of Python writes."""
    with contextlib.redirect_stdout(io.StringIO()) as written:
        exec(program, {})
    return written.getvalue()
