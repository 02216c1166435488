"""The trainer as a person starts it: `torchrun PKG/train.py`, real processes, signals and exit codes."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from mgraph.runtime.options import parse
from mgraph.runtime.train import run

Runner = Callable[..., "subprocess.CompletedProcess[str]"]


def arguments(text_file: Path, out: Path, *more: str) -> list[str]:
    small = (
        "--steps 14 --batch-size 3 --seq-len 19 --warmup 3 --lr 0.02 --accumulate 2 --eval-every 5 --sample-length 0"
    )
    return [*small.split(), "--data", str(text_file), "--out", str(out), *more]


@pytest.mark.full
def test_two_processes(
    package_dir: Path,
    make_package: Callable[..., Path],
    text_file: Path,
    tmp_path: Path,
    trainer: Runner,
    losses: Callable[[Path], list[float]],
) -> None:
    """Two processes equal one with both microbatches; stopped by SIGTERM at one of them and resumed, bit for bit.

    Over which axes ranks see different data matters to nothing: the run goes on over another one.
    """
    run(parse(arguments(text_file, tmp_path / "alone"), "train.py"), package_dir)
    whole = trainer(package_dir, *arguments(text_file, tmp_path / "whole"), processes=2)
    assert whole.returncode == 0, whole.stderr
    assert whole.stdout.count("train loss") == 1 and whole.stderr.count("step 5  validation loss") == 1
    assert losses(tmp_path / "whole") == pytest.approx(losses(tmp_path / "alone"), abs=1e-6)

    cut = trainer(package_dir, *arguments(text_file, tmp_path / "cut"), processes=2, TEST_STOP_AT="9")
    assert cut.returncode == 0, cut.stderr
    assert "stopped after step 9" in cut.stderr and "train loss" not in cut.stdout
    other = make_package(axis="fsdp")
    resumed = trainer(other, *arguments(text_file, tmp_path / "cut", "--resume"), processes=2)
    assert resumed.returncode == 0, resumed.stderr
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert resumed.stdout.splitlines()[-1] == whole.stdout.splitlines()[-1]


def test_an_error_is_printed_once_and_ends_all_ranks(package_dir: Path, tmp_path: Path, trainer: Runner) -> None:
    """torchrun itself exits with 1, and says which code it saw."""
    done = trainer(package_dir, "--data", "absent.txt", "--seq-len", "19", processes=2)
    assert done.returncode != 0 and "exitcode  : 2" in done.stderr
    assert done.stderr.count("error: --data absent.txt: no such file or directory") == 1
    assert "mgraph/runtime" not in done.stderr  # no traceback of ours beside that of torchrun
    assert not (tmp_path / "runs").exists()


def test_an_edited_package_exits_2_without_a_traceback(package_dir: Path, tmp_path: Path, trainer: Runner) -> None:
    step = package_dir / "step.py"
    step.write_text(
        step.read_text().replace("def finish(state: State, lr: Tensor)", "def finish(state: State, lr: Tensor")
    )
    done = trainer(package_dir)
    line = next(n for n, text in enumerate(step.read_text().splitlines(), 1) if "def finish" in text)
    assert f"error: step.py is not valid Python: invalid syntax\n  at {step}:{line}\n  try: " in done.stderr
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()
