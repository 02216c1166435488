"""Meshes that cannot be: one message that says what to do, exit code 2, and nothing is written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import Mgraph

SIZED = "with a size of at least 1"
DIVIDES = ["embed.weight", "an fsdp that divides a dim of each"]
CASES: list[tuple[str, list[str]]] = [
    # text that is no mesh
    ("", ["the mesh is empty", "dp=1 for one process"]),
    (",", ["the mesh is empty"]),
    ("dp=2,,tp=2", ["mesh axis ''", SIZED]),
    ("tp=2,", ["mesh axis ''", SIZED]),
    ("dp", ["'dp'", SIZED]),
    ("dp=", ["'dp='", SIZED]),
    ("dp=two", ["'dp=two'", SIZED]),
    ("dp=1.5", ["'dp=1.5'", SIZED]),
    ("dp=²", ["'dp=²'", SIZED]),
    ("dp=2;tp=2", ["'dp=2;tp=2'", SIZED]),
    ("dp=2 tp=2", ["'dp=2 tp=2'", SIZED]),
    # sizes
    ("dp=0", ["'dp=0'", SIZED]),
    ("tp=-2", ["'tp=-2'", SIZED]),
    ("dp=2,fsdp=0", ["'fsdp=0'", SIZED]),
    ("ep=-2", ["'ep=-2'", SIZED, "a whole number", "dp alone may be *"]),
    ("dp=2,ep=-2", ["'ep=-2'", SIZED]),
    ("ep=0", ["'ep=0'", SIZED]),
    ("fsdp=*", ["fsdp has no size", "fsdp=2"]),
    ("dp=*,tp=*", ["tp has no size", "tp=2"]),
    # axes
    ("dp=2,pp=2", ["'pp' is not supported", "dp, fully sharded fsdp, tensor-parallel tp and expert-parallel ep"]),
    ("TP=2", ["'TP' is not supported"]),
    ("=2", ["'' is not supported"]),
    ("dp=2,dp=4", ["'dp' is given twice", "each axis once"]),
    ("tp=2,dp=*,tp=2", ["'tp' is given twice"]),
    # experts
    ("ep=2", ["no experts that ranks could share", "a mesh without ep"]),
    ("ep=*", ["ep has no size", "ep=2"]),
    *[
        (mesh, ["does not say over which axes experts lie", "ep=dp*fsdp"])
        for mesh in (
            "ep=fsdp",
            "dp=2,ep=fsdp",
            "dp=*,ep=dp",
            "tp=2,ep=tp",
            "dp=2,ep=dp*dp",
            "dp=2,ep=dp,ep=2",
            "dp=2,ep=dp*",
            "dp=2,ep=2,ep=dp",
        )
    ],
    # what does not divide
    ("tp=3", ["tp=3 does not divide the 256 entries of the vocabulary of embed", "or in training --pad vocab"]),
    (
        "tp=8",
        ["tp=8 does not divide the 4 heads of layers.*.attn", "attention.py:", "divides 4, or in training --pad heads"],
    ),
    ("fsdp=3", ["fsdp=3 divides no dim of 21 parameters of 21", *DIVIDES]),
    ("dp=2,fsdp=1024,tp=2", ["fsdp=1024 divides no dim", *DIVIDES]),
]


@pytest.mark.parametrize(("mesh", "said"), CASES, ids=[mesh for mesh, _ in CASES])
def test_refused(mgraph: Mgraph, tmp_path: Path, mesh: str, said: list[str]) -> None:
    run = mgraph("compile", "dense-tiny", "--arch", "none", f"--mesh={mesh}", "-o", tmp_path / "out")
    assert (run.code, run.out) == (2, "")
    assert run.err.count("error: ") == 1 and all(text in run.err for text in said), run.err
    assert "  at " in run.err and "  try: " in run.err, run.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mesh", ["fsdp=2", "dp=2", "dp=2,tp=2"])
def test_serving_shares_layers_alone(mgraph: Mgraph, tmp_path: Path, mesh: str) -> None:
    run = mgraph("compile", "dense-tiny", "--arch", "none", "--for", "serve", f"--mesh={mesh}", "-o", tmp_path / "out")
    assert run.code == 2
    assert "is for training" in run.err and "tp=N, to serve" in run.err
    assert not list(tmp_path.iterdir())


def test_another_number_of_processes(mgraph: Mgraph, tmp_path: Path) -> None:
    """How many there are is known at launch alone."""
    package, out = tmp_path / "package", tmp_path / "run"
    assert mgraph("compile", "dense-tiny", "--arch", "none", "--mesh", "dp=2,tp=2", "-o", package).code == 0
    command = [sys.executable, str(package / "train.py"), "--device", "cpu", "--out", str(out)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 2
    assert run.stderr.startswith("error: the package's mesh dp=2,tp=2 needs 4 processes, and 1 ")
    assert "try: torchrun --nproc-per-node 4" in run.stderr and "Traceback" not in run.stderr
    assert not out.exists()
