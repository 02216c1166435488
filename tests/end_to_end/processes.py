"""Packages trained by real processes: a run per model, mesh and options, and how close two runs are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mgraph.compiler import compile_package
from mgraph.runtime.options import parse
from mgraph.runtime.train import run
from tests.end_to_end.meshes import Row

EPSILON = 1e-2
"""With a large epsilon the update is smooth in the gradient: Adam's own magnifies what is near zero."""
RUN = (
    "--steps 3 --batch-size 3 --seq-len 20 --accumulate 4 --lr 1e-2 --device cpu --threads 1 "
    "--eval-every 0 --eval-batches 1 --sample-length 0 --save-every 0"
)
"""The trainer's options: microbatches that up to 4 data ranks share."""


@dataclass(frozen=True)
class Result:
    """The records of a run's steps, and the directory of its weights."""

    steps: list[dict[str, float]]
    weights: Path

    def numbers(self, name: str) -> list[float]:
        """One number of each step."""
        return [step[name] for step in self.steps]


class Runs:
    """Runs of packages, each of which is compiled once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.count = 0
        self._packages: dict[Row, Path] = {}
        self._alone: dict[Row, Result] = {}

    def train(self, row: Row, *options: str) -> Result:
        """Train the package of a row with a process per rank (one rank in this process, which starts nothing), and
        export its weights."""
        if row not in self._packages:
            package = self.directory / f"package{len(self._packages)}"
            compile_package(row.recipe(self.directory, output=str(package), eps=EPSILON))
            self._packages[row] = package
        package = self._packages[row]
        self.count += 1
        out, weights = self.directory / f"run{self.count}", self.directory / f"weights{self.count}"
        arguments = [*RUN.split(), "--out", str(out), "--export", str(weights), *options]
        if row.ranks == 1:
            run(parse(arguments, "train.py"), package)
        else:
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(row.ranks)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            command = [*launch, str(package / "train.py"), *arguments]
            done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)
            assert done.returncode == 0, done.stderr
        records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
        return Result([r for r in records if "loss" in r], weights)

    def alone(self, row: Row) -> Result:
        """The run of one process that a row is compared with."""
        if row.alone not in self._alone:
            self._alone[row.alone] = self.train(row.alone)
        return self._alone[row.alone]


def assert_close(expected: Result, found: Result) -> None:
    """Losses, norms of gradients, and all weights in the end are equal up to rounding in f32."""
    assert len(expected.steps) == len(found.steps) == 3
    for name in ("loss", "grad_norm"):
        assert found.numbers(name) == pytest.approx(expected.numbers(name), rel=1e-5)
    before, after = (load_file(r.weights / "model.safetensors") for r in (expected, found))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=1e-5 * float(tensor.abs().max()), msg=name)
