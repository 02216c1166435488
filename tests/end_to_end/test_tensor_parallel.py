"""Packages over a tensor-parallel axis: real processes train as one does, and what they save and export is the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mgraph.compiler import compile_package
from mgraph.recipe import Recipe
from tests.sampling import sampled

# With a large epsilon the update is smooth in the gradient: Adam's own magnifies what is near zero.
EPSILON = 1e-2
RUN = (
    "--steps 3 --batch-size 3 --seq-len 18 --accumulate 2 --lr 1e-2 --device cpu --threads 1 "
    "--eval-every 0 --eval-batches 1 --sample-length 0 --save-every 0"
)


@dataclass(frozen=True)
class Result:
    """The records of a run's steps, and the directory of its weights."""

    steps: list[dict[str, float]]
    weights: Path

    def numbers(self, name: str) -> list[float]:
        """One number of each step."""
        return [step[name] for step in self.steps]


class Runs:
    """Runs by mesh, each of a package that is compiled once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.count = 0

    def train(self, mesh: str, processes: int, *options: str, sequence: bool = False) -> Result:
        """Train a package for a mesh, and export its weights."""
        package = self.directory / f"{mesh}{'-sequence' if sequence else ''}"
        if not package.exists():
            recipe = Recipe(model="dense-tiny", mesh=mesh, output=str(package), arch="none", eps=EPSILON)
            compile_package(replace(recipe, sequence_parallel=sequence))
        self.count += 1
        out, weights = self.directory / f"run{self.count}", self.directory / f"weights{self.count}"
        launch = [sys.executable]
        if processes > 1:
            launch += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command = [*launch, str(package / "train.py"), *RUN.split(), "--out", str(out), "--export", str(weights)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=240, env=environment)
        assert done.returncode == 0, done.stderr
        records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
        return Result([r for r in records if "loss" in r], weights)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def alone(runs: Runs) -> Result:
    return runs.train("dp=1", 1)


@pytest.mark.parametrize("sequence", sampled([False, True], 1, always=[True]))
def test_processes_train_as_one(runs: Runs, alone: Result, sequence: bool) -> None:
    found = runs.train("dp=2,tp=2", 4, sequence=sequence)
    assert len(alone.steps) == len(found.steps) == 3
    for name in ("loss", "grad_norm"):
        assert found.numbers(name) == pytest.approx(alone.numbers(name), rel=1e-5)
    before, after = (load_file(r.weights / "model.safetensors") for r in (alone, found))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=1e-5 * float(tensor.abs().max()), msg=name)


@pytest.mark.full
def test_weights_are_loaded_by_parts(runs: Runs, alone: Result) -> None:
    """Ranks that begin with files of weights go on as the one that wrote them would."""
    one = runs.train("dp=1", 1, "--init", str(alone.weights))
    two = runs.train("tp=2", 2, "--init", str(alone.weights))
    assert one.numbers("loss")[0] != pytest.approx(alone.numbers("loss")[0], rel=1e-3)
    assert two.numbers("loss") == pytest.approx(one.numbers("loss"), rel=1e-5)


@pytest.mark.full
def test_more_ranks_than_key_value_heads(runs: Runs, alone: Result) -> None:
    """Two ranks share each of two heads."""
    found = runs.train("tp=4", 4)
    for name in ("loss", "grad_norm"):
        assert found.numbers(name) == pytest.approx(alone.numbers(name), rel=1e-5)
    before, after = (load_file(r.weights / "model.safetensors") for r in (alone, found))
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=1e-5 * float(tensor.abs().max()), msg=name)
