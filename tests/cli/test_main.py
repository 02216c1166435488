"""How the command line ends: help, our own mistakes, interrupts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mgraph.cli import main

from .conftest import Mgraph


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from mgraph.cli import main; code = main(['--help']); "
        "heavy = {'torch', 'sympy', 'numpy', 'triton', 'rich'} & set(sys.modules); "
        "print(sorted(heavy), file=sys.stderr); sys.exit(code)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stderr == "[]\n"
    assert "compile" in result.stdout


def test_no_verb_is_help(mgraph: Mgraph) -> None:
    assert mgraph().out == mgraph("--help").out


@pytest.mark.parametrize(
    ("arguments", "verb"), [(("tune", "x", "--batch-size"), "mgraph tune"), (("--what",), "mgraph")]
)
def test_usage_names_the_help_of_what_was_called(mgraph: Mgraph, arguments: tuple[str, ...], verb: str) -> None:
    run = mgraph(*arguments)
    assert run.code == 2 and f"at {verb}\n  try: {verb} --help" in run.err


def _fail() -> None:
    raise AssertionError("a dim got lost\nmore")


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """`mgraph passes` fails by our own mistake; temporary files go to the path."""
    monkeypatch.setattr("mgraph.cli.catalogue.passes", _fail)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("MGRAPH_DEBUG", raising=False)
    return tmp_path


def test_internal_error_is_written_to_a_file(failing: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["passes"]) == 3
    text = capsys.readouterr().err
    assert "internal error: AssertionError: a dim got lost; please report it" in text
    assert "Traceback" not in text
    (path,) = re.findall(r"traceback is in (\S+);", text)
    assert Path(path).parent == failing
    assert "in _fail" in Path(path).read_text()


def test_debug_prints_the_traceback(
    failing: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MGRAPH_DEBUG", "1")
    assert main(["passes"]) == 3
    assert "in _fail" in capsys.readouterr().err
    assert not list(failing.iterdir())


def test_interrupt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mgraph.cli.catalogue.passes", interrupted)
    assert main(["passes"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
