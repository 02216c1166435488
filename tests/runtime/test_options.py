"""The command line of a trainer."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from mgraph.errors import OptionError
from mgraph.runtime.options import Options, flag, parse


def test_defaults_and_values() -> None:
    assert parse([], "train.py") == Options()
    options = parse(["--steps", "7", "--lr", "2e-3", "--out", "a/b", "--resume", "--decay", "linear"], "train.py")
    assert (options.steps, options.lr, options.out, options.resume) == (7, 2e-3, Path("a/b"), True)
    assert options.decay == "linear"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stepz", "3"], r"(?s)unrecognized arguments: --stepz 3.*did you mean '--steps'\?"),
        (["--step", "3"], r"(?s)unrecognized arguments: --step 3.*did you mean '--steps'\?"),
        (["--chat-templat=a=b"], r"(?s)unrecognized arguments.*did you mean '--chat-template'\?"),
        (["--steps", "many"], "--steps 'many': must be a whole number"),
        (["--steps"], "argument --steps: expected one argument"),
        (["--steps", "0"], "--steps 0: must be at least 1"),
        (["--lr", "-1"], "--lr -1.0: must be at least 0"),
        (["--lr", "nan"], "--lr nan: must be at least 0"),
        (["--lr", "inf"], "--lr inf: must be finite"),
        (["--decay", "square"], "argument --decay: invalid choice: 'square'"),
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
        (["extra"], r"(?s)unrecognized arguments: extra.*train\.py --help"),
    ],
)
def test_wrong_input(arguments: list[str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        parse(arguments, "train.py")


def test_help_lists_all_options_and_exit_codes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["--help"], "train.py")
    text = capsys.readouterr().out
    assert caught.value.code == 0 and "exit codes:" in text
    assert all(flag(item.name) in text for item in fields(Options))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        parse(["--help"], "train.py")
    assert capsys.readouterr().out == ""


def test_the_least_rate_is_no_higher_than_the_rate() -> None:
    assert (Options().min_lr, Options(lr=2e-4).min_lr) == (1e-4, 1e-4)
    assert Options(lr=1e-5).min_lr == pytest.approx(1e-6) and Options(lr=0.0).min_lr == 0
    assert Options(lr=1e-5, min_lr=1e-5).min_lr == 1e-5
    with pytest.raises(OptionError, match=r"--min-lr 0\.01 is above --lr 0\.001"):
        Options(min_lr=0.01)
