"""What docs/serving.md begins with, as it is written there: from a model definition to streamed text."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.runtime.serving.browser import MISSING, ask, opened

DOCUMENT = Path(__file__).parents[2] / "docs" / "serving.md"
STEPS = ["--steps", "3", "--batch-size", "2", "--seq-len", "32"]


@pytest.mark.full
def test_the_sequence_of_the_documentation(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """`make demo` is run with few steps and one process; all else is taken from the blocks of the document."""
    document = DOCUMENT.read_text("utf-8").replace("build/", f"{tmp_path}/build/").replace("runs/", f"{tmp_path}/runs/")
    shell, with_curl, with_client, alone = re.findall(r"^```\w*\n(.*?)^```", document, re.M | re.S)[:4]
    demo, compiling, serving = [shlex.split(line, comments=True) for line in shell.splitlines()]
    assert demo == ["make", "demo"] and "openai" in with_client and "LLM" in alone
    program = [sys.executable, "-m"]
    package = tmp_path / "train"
    trained = [*program, "mgraph", "compile", "moe-demo", "--for", "train", "--target", "cpu", "-o", str(package)]
    subprocess.run(trained, check=True, timeout=300)
    run = [sys.executable, str(package / "train.py"), "--out", str(tmp_path / "runs" / "demo"), *STEPS]
    subprocess.run(run, check=True, timeout=300)
    subprocess.run([*program, *compiling], check=True, timeout=300)
    with subprocess.Popen([*program, *serving, "--port", "0"], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            assert line.startswith("serving moe-demo-serve at http://127.0.0.1:"), line
            address = line.split()[-1]
            streamed = said(with_client.replace("http://127.0.0.1:8000", address))
            curl = shlex.split(with_curl.replace("http://127.0.0.1:8000", address).replace("\\\n", " "))
            events = curl_says(curl)
            with subtests.test("the page in a browser"):
                if MISSING:
                    pytest.skip("needs chromium and chromedriver")
                with opened() as browser:
                    browser.open(address)
                    ask(browser, "The ", 20)
                    browser.until("at('output').textContent.length > 20", 60)
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert events[-1] == "[DONE]" and len(events) > 10
    assert 80 <= len(streamed.encode()) <= 3 * 80, "80 bytes, of which some may be no text"
    assert len(said(alone).encode()) >= 80


def curl_says(command: list[str]) -> list[str]:
    """The events of a stream, by curl where it is installed, else by the same request in Python."""
    if shutil.which("curl"):
        text = subprocess.run([*command, "-s"], check=True, timeout=120, capture_output=True).stdout
    else:
        address, header, body = command[2], command[4].split(": "), command[6].encode()
        with urllib.request.urlopen(urllib.request.Request(address, body, dict([header])), timeout=120) as answer:
            text = answer.read()
    return [event.removeprefix("data: ") for event in text.decode("utf-8").split("\n\n") if event]


def said(program: str) -> str:
    """What a piece of Python writes."""
    with contextlib.redirect_stdout(io.StringIO()) as written:
        exec(program, {})
    return written.getvalue()
