"""Runs a whole emitted step, by twins or with all its kernels in Triton's interpreter.

A program of its own, since interpreted and compiled kernels cannot share a process: `python interpret_step.py PKG
RESULTS`, where PKG holds the manifest's kernels, `kernels.py`, `reference.py`, `step.py` and `inputs.pt`: the state and
the inputs of each entry to call, in order. With TRITON_INTERPRET=1 every site runs its kernel. RESULTS gets the outputs
of each entry, and the state as it is afterwards.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from mgraph.runtime import kernels as runtime
from mgraph.runtime import v1
from tests.codegen.triton.interpret_cases import Interpreter


def bound(step_file: str) -> runtime.Kernels:
    """The sites of a package: kernels in the interpreter if there is one, else twins."""
    directory = Path(step_file).parent
    entries = json.loads((directory / "manifest.json").read_text())["kernels"]
    twins = runtime._import_file(directory / "reference.py")
    if not os.environ.get("TRITON_INTERPRET"):
        return runtime.bind(entries, directory, twins, None, strict=True, jit=False)
    sites = runtime.bind(entries, directory, twins, Interpreter(), strict=True, jit=True)
    assert set(sites.providers.values()) == {"jit"}, sites.providers
    return sites


def main(directory: Path, results: Path) -> None:
    v1.kernels = bound  # type: ignore[assignment]
    file = directory / "step.py"
    step: dict[str, Any] = {"__file__": str(file), "__name__": "step"}
    exec(compile(file.read_text(), str(file), "exec"), step)
    state, calls = torch.load(directory / "inputs.pt")
    outputs = [step[entry](state, *inputs) for entry, inputs in calls]
    torch.save((outputs, state), results)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
