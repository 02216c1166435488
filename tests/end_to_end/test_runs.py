"""Training runs of an emitted package: two processes equal one, and an interrupted run resumes bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from mgraph.runtime.checkpoint import latest
from tests.end_to_end.builds import build

COMMON = ["--batch-size", "2", "--seq-len", "32", "--steps", "12", "--log-every", "1", "--warmup", "3", "--lr", "0.003"]
QUIET = ["--eval-every", "0", "--eval-batches", "1", "--sample-length", "0", "--save-every", "0"]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The mixture-of-experts model's package."""
    return build("moe-tiny", tmp_path_factory.mktemp("runs")).path


def command(package: Path, out: Path, processes: int, *options: str) -> list[str]:
    """The command that trains the package."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [*launch, str(package / "train.py"), "--out", str(out), *COMMON, *QUIET, *options]


def losses(out: Path) -> dict[int, float]:
    """The training losses of a run by step."""
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run to the end, with one thread per process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(arguments, capture_output=True, text=True, timeout=240, env=environment)


@pytest.mark.full
def test_two_processes_equal_one_with_both_microbatches(package: Path, tmp_path: Path) -> None:
    one = run(*command(package, tmp_path / "one", 1, "--accumulate", "2"))
    two = run(*command(package, tmp_path / "two", 2))
    assert one.returncode == two.returncode == 0, one.stderr + two.stderr
    first, second = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert list(first) == list(second) == list(range(1, 13))
    assert first[12] < first[1]
    for step, loss in first.items():
        assert second[step] == pytest.approx(loss, rel=1e-6), step


@pytest.mark.full
def test_an_interrupted_run_resumes_bit_for_bit(package: Path, tmp_path: Path) -> None:
    whole = run(*command(package, tmp_path / "whole", 1))
    assert whole.returncode == 0, whole.stderr
    out = tmp_path / "interrupted"
    stop_after = random.Random(torch.initial_seed() + os.getpid()).randint(1, 8)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RANK": "0", "WORLD_SIZE": "1"}
    direct = [sys.executable, str(package / "train.py"), "--out", str(out), *COMMON, *QUIET]
    process = subprocess.Popen(direct, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    deadline = time.monotonic() + 120
    while not (out / "log.jsonl").exists() or len(losses(out)) < stop_after:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1]
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode == 0
    saved = latest(out / "checkpoints")
    assert saved is not None and stop_after <= saved.step < 12, f"stopped after step {stop_after}"
    resumed = run(*command(package, out, 1, "--resume"))
    assert resumed.returncode == 0, resumed.stderr
    assert losses(out) == losses(tmp_path / "whole"), f"stopped after step {stop_after}"
