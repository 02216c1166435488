"""`mgraph serve`: what it says where it cannot begin. What it does then is tested with the server."""

from __future__ import annotations

from pathlib import Path

import pytest

from mgraph.cli import main
from mgraph.compiler import compile_package
from mgraph.recipe import Recipe


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the package is missing"),
        (["--port", "80"], "the package is missing"),
        (["nowhere"], "there is no such directory"),
        ([__file__], "this is a file, not a package's directory"),
        ([".", "--hots", "x"], "did you mean '--host'?"),
        ([".", "--random-init", "--port", "x"], "--port 'x': must be a whole number"),
        ([".", "--random-init", "--max-body", "inf"], "--max-body inf: must be at most"),
        ([".", "--random-init", "--cache-memory", "1GiB"], "--cache-memory is GiB of the cache"),
        ([".", "--port", "0"], "there are no weights to serve"),
        ([".", "--port", "0", "--weights", "w", "--random-init"], "exclude each other"),
        ([".", "--port", "0", "--random-init"], "manifest.json"),
        ([".", "--port", "0", "--random-init", "--prompt", "x"], "manifest.json"),
    ],
)
def test_wrong_usage(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["serve", *arguments]) == 2
    said = capsys.readouterr()
    assert message in said.err and said.out == "" and "Traceback" not in said.err


def test_a_package_of_another_kind_needs_no_weights(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    compile_package(Recipe(model="dense-tiny", arch="none", output=str(tmp_path / "trained")))
    assert main(["serve", str(tmp_path / "trained")]) == 2
    said = capsys.readouterr().err
    assert "is a train package" in said and "--for serve" in said and "weights" not in said


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--help"])
    assert caught.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: mgraph serve PKG") and "--drain-timeout" in said
