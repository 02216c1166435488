"""Offloading on a GPU: the same losses and gradients bit for bit, memory as predicted, and what it costs.

python3 -m benchmarks.gpu.offload build DIRECTORY      needs no GPU
python3 -m benchmarks.gpu.offload run DIRECTORY        under a minute

Each variant of the dense model of 0.9 B parameters takes a few steps on the same batches, with CUDA graphs from the
second on. A row says seconds a step, the measured peak beside the predicted one, and whether all losses, gradients
and norms equal those of the package without offloading.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import rows, training_models
from mgraph.compiler import compile_package
from mgraph.recipe import Recipe
from mgraph.runtime.package import load_package
from mgraph.runtime.state import create_state

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "some": {"offload": "activations=150MiB"},
    "activations": {"offload": "activations"},
    "optimizer": {"offload": "optimizer"},
    "all": {"offload": "activations,optimizer", "recompute": "full"},
}
MODEL = "dense"
STEPS = 5
PREDICTED = "predicted.json"


def build(directory: Path) -> None:
    """Compile a package per variant, and write down what is predicted."""
    from mgraph.codegen.memory import RankMemory
    from mgraph.passes.activations import extents

    shape = training_models.SHAPES[MODEL]
    predicted = {}
    for name, more in VARIANTS.items():
        settings: dict[str, Any] = {
            "mesh": "dp=1",
            "precision": "bf16",
            "grad_dtype": "param",
            "target": "h100",
            **more,
        }
        settings |= {"batch": shape.batch, "seq": shape.length, "output": str(directory / name)}
        done = compile_package(Recipe(f"{training_models.__file__}:{MODEL}", **settings))
        memory = RankMemory(done.module, extents(done.module, {"B": shape.batch, "S": shape.length}), {"dp": 1})
        steps = max(memory.entry(entry).bytes for entry in ("microbatch", "finish"))
        predicted[name] = sum(memory.state().values()) + steps
        print(done.package, flush=True)
    (directory / PREDICTED).write_text(json.dumps(predicted), encoding="utf-8")


def measured(path: Path, device: torch.device) -> tuple[dict[str, Any], list[Tensor]]:
    """Seconds and bytes of a package, and what is to be equal: losses, norms and the last gradients, on the host."""
    package = load_package(path, device)
    torch.cuda.reset_peak_memory_stats()
    state = create_state(package.state_specs, 0, device)
    found: list[Tensor] = []
    begun = 0.0
    for index, batch in enumerate(training_models.SHAPES[MODEL].batches(0, STEPS, device)):
        if index == 2:  # the graphs are there
            torch.cuda.synchronize()
            begun = time.perf_counter()
        given = package.call("microbatch", state, *batch)
        if index == STEPS - 1:
            found += [tensor.cpu() for name, tensor in state.items() if name.endswith(".grad")]
        given |= package.call("finish", state, torch.tensor(1e-4, device=device))
        found += [given["loss"], given["grad_norm"]]
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - begun) / (STEPS - 2)
    return {"seconds": seconds, "peak": torch.cuda.max_memory_allocated()}, [tensor.cpu() for tensor in found]


def run(directory: Path) -> None:
    """A line per variant; exit code 1 where results differ."""
    device = rows.gpu()
    predicted = json.loads((directory / PREDICTED).read_text(encoding="utf-8"))
    expected: list[Tensor] = []
    wrong = []
    for name in VARIANTS:
        gc.collect()
        torch.cuda.empty_cache()
        row, found = measured(directory / name, device)
        expected = expected or found
        same = all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        wrong += [] if same else [name]
        peak, foretold = row["peak"] / 2**30, predicted[name] / 2**30
        print(
            f"{name:12} {row['seconds'] * 1e3:8.1f} ms  peak {peak:6.2f} GiB, predicted {foretold:6.2f} "
            f"({foretold / peak - 1:+.1%})  {'the same' if same else 'DIFFERS'}",
            flush=True,
        )
    sys.exit(bool(wrong))


def main() -> None:
    """`build` or `run`, with a directory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("build", "run"))
    parser.add_argument("directory", type=Path)
    options = parser.parse_args()
    {"build": build, "run": run}[options.what](options.directory)


if __name__ == "__main__":
    main()
