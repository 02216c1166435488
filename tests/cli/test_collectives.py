"""`mgraph collectives` on a package, and on a module of many layers over several axes."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mgraph.cli import collectives
from mgraph.ir.graph import Module
from tests.ir.layers import layers

from .conftest import Mgraph


def test_the_reduction_of_a_package(mgraph: Mgraph, compiled: Path) -> None:
    """Its bytes are those of the gradients, the loss and the count."""
    manifest = json.loads((compiled / "manifest.json").read_text())
    gradients = sum(4 * math.prod(s["shape"]) for s in manifest["state"] if s["kind"] == "grad")
    run = mgraph("collectives", compiled)
    (line,) = (line for line in run.out.splitlines() if "all_reduce" in line)
    assert line.split()[:6] == ["1", "1", "all_reduce", "dp", "*", str(gradients + 4 + 8)]
    assert "finish: 1 collective\n" in run.out and "at B=8, S=2048" in run.out
    (found,) = json.loads(mgraph("collectives", compiled, "--format", "json").out)
    assert (found["entry"], found["first"], found["last"], found["times"]) == ("finish", 1, 1, 1)
    assert (found["kind"], found["axis"], found["evaluated"]) == ("all_reduce", "dp", gradients + 4 + 8)
    assert found["function"] == "finish" and found["overlap"] == {"nodes": 0, "flops": "0"}


def test_layers(mgraph: Mgraph, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = {"fingerprint": {"options": {"batch": 3, "seq": 64}}}
    package = SimpleNamespace(manifest=manifest, snapshots=[SimpleNamespace(module=layers(94, dp="*", tp=8))])
    monkeypatch.setattr(collectives, "open_package", lambda path: package)
    entry, totals = mgraph("collectives", "PKG").out.split("\n\n")[1:]
    rows = [line.split("  ") for line in entry.splitlines()[2:]]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert cells == [
        ["1-187", "94", "all_gather", "tp", "8", "64*B*S", "12KiB", "@ahead layers.*", "nothing", "model.py:10"],
        ["2-188", "94", "reduce_scatter", "tp", "8", "64*B*S", "12KiB", "@layer layers.*", "nothing", "model.py:14"],
        ["189", "1", "all_to_all", "tp", "8", "8*B*S", "1.5KiB", "@main layers.*", "nothing", "model.py:21"],
        ["190", "1", "all_reduce", "all", "*", "4", "4B", "@main layers.*", "1 node, 512 flops", "model.py:23"],
    ]
    # 94 gathers and 94 reductions of 12 KiB, one exchange of 1.5 KiB.
    assert [line.split() for line in totals.splitlines()[1:]] == [
        ["tp", "8", "main", "189", f"{round((188 * 12 + 1.5) / 1024, 2):g}MiB"],
        ["all", "*", "main", "1", "4B"],
    ]


def test_none(mgraph: Mgraph, monkeypatch: pytest.MonkeyPatch) -> None:
    package = SimpleNamespace(manifest={}, snapshots=[SimpleNamespace(module=Module("alone"))])
    monkeypatch.setattr(collectives, "open_package", lambda path: package)
    assert mgraph("collectives", "PKG").out == "no collectives: every rank works alone\n"
    assert json.loads(mgraph("collectives", "PKG", "--format", "json").out) == []


def test_wrong_usage(mgraph: Mgraph, compiled: Path) -> None:
    run = mgraph("collectives", compiled, "--format", "jsn")
    assert (run.code, run.out) == (2, "") and "did you mean 'json'?" in run.err
    run = mgraph("collectives", compiled / "nowhere")
    assert run.code == 2 and "mgraph compile" in run.err


def test_needs_no_torch(compiled: Path) -> None:
    code = (
        "import sys; from mgraph.cli import main; code = main(sys.argv[1:]); "
        "print(sorted({'torch', 'triton'} & set(sys.modules)), file=sys.stderr); sys.exit(code)"
    )
    command = [sys.executable, "-c", code, "collectives", str(compiled)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stderr == "[]\n"
