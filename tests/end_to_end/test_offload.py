"""A run goes on from a checkpoint whether its packages offload or not, and gives the same losses and weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mgraph.compiler import compile_package
from mgraph.recipe import Recipe
from tests.runtime.conftest import read_losses, run_trainer

OPTIONS = "--batch-size 2 --seq-len 33 --accumulate 2 --warmup 2 --eval-batches 1 --sample-length 0 --threads 1"


@pytest.mark.full
def test_checkpoints_are_the_same(tmp_path: Path) -> None:
    packages = {}
    for name, offload in (("plain", ""), ("moved", "activations,optimizer")):
        packages[name] = tmp_path / name
        recipe = Recipe("dense-tiny", precision="bf16", offload=offload, output=str(packages[name]), arch="none")
        compile_package(recipe)

    def train(name: str, out: str, steps: int, *options: str) -> None:
        command = [*OPTIONS.split(), "--steps", steps, "--out", tmp_path / out, "--resume", *options]
        done = run_trainer(packages[name], *command)
        assert done.returncode == 0, done.stderr

    weights = {out: ("--export", str(tmp_path / f"{out}-weights"), "--export-dtype", "f32") for out in ("one", "two")}
    train("plain", "one", 6, *weights["one"])
    train("moved", "two", 2)
    train("plain", "two", 3)
    train("moved", "two", 6, "--poison", *weights["two"])
    assert read_losses(tmp_path / "one") == read_losses(tmp_path / "two")
    found, expected = (load_file(tmp_path / f"{out}-weights" / "model.safetensors") for out in ("two", "one"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
