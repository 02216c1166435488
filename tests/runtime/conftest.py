"""A hand-written step package (`bigram/`), a small text, and a way to run the trainer as a person would."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SHAPES = {"embed.weight": [256, 12], "hidden.weight": [20, 12], "head.weight": [256, 20]}
Runner = Callable[..., subprocess.CompletedProcess[str]]


def state_entries() -> list[dict[str, Any]]:
    """The manifest's state of the bigram model."""
    entries: list[dict[str, Any]] = []
    for name, shape in SHAPES.items():
        common = {"dtype": "f32", "shape": shape}
        normal = [["normal_", 0.0, 0.1]]
        entries.append({"name": name, "kind": "param", "trainable": True, "persist": True, "init": normal, **common})
        for kind in ("exp_avg", "exp_avg_sq"):
            entries.append(
                {"name": f"{name}.{kind}", "kind": "moment", "persist": True, "init": [["zeros_"]], **common}
            )
        entries.append({"name": f"{name}.grad", "kind": "grad", "persist": False, "init": [["zeros_"]], **common})
    for name, dtype, persist in (
        ("step", "i64", True),
        ("skipped", "i64", True),
        ("loss_sum", "f32", False),
        ("count", "i64", False),
    ):
        scalar = {"kind": "scalar", "shape": [], "init": [["zeros_"]]}
        entries.append({"name": name, "dtype": dtype, "persist": persist, **scalar})
    return entries


def write_package(path: Path, axis: str = "dp", **changes: Any) -> Path:
    """Copy the bigram package to `path`, its gradients summed over `axis`, with a manifest whose keys are replaced by
    `changes`."""
    shutil.copytree(Path(__file__).parent / "bigram", path, ignore=shutil.ignore_patterns("__pycache__"))
    step = path / "step.py"
    step.write_text(step.read_text().replace('"dp"', f'"{axis}"'))
    files = {name: hashlib.sha256((path / name).read_bytes()).hexdigest() for name in ("step.py", "train.py")}
    tokens = {"dtype": "i64", "shape": ["B", "S"]}
    manifest = {
        "schema": 1,
        "kind": "train",
        "name": "bigram",
        "fingerprint": {"ir": "0", "options": {}},
        "mesh": {axis: "*"},
        "dims": {"B": [1, None], "S": [2, 64]},
        "vocab_size": 256,
        "inputs": [{"name": "tokens", **tokens}, {"name": "labels", **tokens}],
        "state": state_entries(),
        "entries": {
            "microbatch": {"inputs": ["tokens", "labels"], "outputs": ["loss_sum", "count"]},
            "finish": {"inputs": ["lr"], "outputs": ["loss", "grad_norm", "count", "skipped"]},
            "evaluate": {"inputs": ["tokens", "labels"], "outputs": ["loss_sum", "count"]},
            "predict": {"inputs": ["tokens"], "outputs": ["logits"]},
        },
        "kernels": [],
        "files": files,
    }
    (path / "manifest.json").write_text(json.dumps({**manifest, **changes}))
    return path


@pytest.fixture
def package_dir(tmp_path: Path) -> Path:
    return write_package(tmp_path / "package")


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    """About 20 KB in which each letter tells much about the next."""
    lines = (f"line {n}: the quick brown fox number {n * n % 97} jumps over the lazy dog\n" for n in range(320))
    path = tmp_path / "text.txt"
    path.write_text("".join(lines))
    return path


@pytest.fixture
def make_package(tmp_path: Path) -> Callable[..., Path]:
    """A function that writes a package, with keys of its manifest replaced."""
    return lambda **changes: write_package(tmp_path / "changed", **changes)


@pytest.fixture
def losses() -> Callable[[Path], list[float]]:
    return read_losses


@pytest.fixture
def trainer() -> Runner:
    return run_trainer


def read_losses(out: Path) -> list[float]:
    """The training losses of a run's log, which must hold each step once, in order."""
    records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    train = [record for record in records if "loss" in record]
    assert [record["step"] for record in train] == list(range(1, len(train) + 1))
    return [record["loss"] for record in train]


def run_trainer(
    package: Path, *arguments: object, processes: int = 0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run PKG/train.py alone (`processes` 0) or under torchrun; `variables` go into the environment."""
    launcher = [sys.executable]
    if processes:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        **variables,
    }
    command = [*launcher, str(package / "train.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, cwd=package.parent)
