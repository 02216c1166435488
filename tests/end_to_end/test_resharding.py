"""A run that changes its mesh at each resume goes on as if it had not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mgraph.compiler import compile_package
from tests.end_to_end.meshes import Row
from tests.runtime.conftest import read_losses, run_trainer

OPTIONS = "--batch-size 2 --seq-len 33 --accumulate 2 --warmup 2 --decay constant --eval-batches 1 --sample-length 0"


@pytest.mark.full
def test_parallel_to_one_and_back(tmp_path: Path) -> None:
    """Also where weights are padded, of which checkpoints know nothing."""
    packages = {}
    for name, mesh, pad in (("one", "dp=*", ""), ("tp", "tp=4", "heads,vocab"), ("fsdp", "fsdp=2", "")):
        packages[name] = tmp_path / name
        recipe = Row("odd", mesh).recipe(tmp_path, output=str(packages[name]), pad=pad)
        compile_package(recipe)
        manifest = json.loads((packages[name] / "manifest.json").read_text())
        axes = {split["axis"] for state in manifest["state"] for split in state.get("placement", ())}
        assert axes == {name} - {"one"}, "the comparison would prove little"
        assert bool(manifest["padded"]) == bool(pad)

    def train(name: str, out: str, steps: int) -> list[float]:
        options = [*OPTIONS.split(), "--steps", steps, "--out", tmp_path / out, "--resume"]
        done = run_trainer(packages[name], *options, processes={"one": 0, "tp": 4, "fsdp": 2}[name])
        assert done.returncode == 0, done.stderr
        return read_losses(tmp_path / out)

    expected = train("one", "whole", 8)
    for name, steps in (("fsdp", 2), ("tp", 4), ("one", 5), ("fsdp", 7), ("tp", 8)):
        found = train(name, "changing", steps)
    assert found == pytest.approx(expected, abs=1e-5)
