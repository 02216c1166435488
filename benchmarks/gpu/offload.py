"""Offloading and recomputation on a GPU: the same losses and gradients bit for bit, memory as predicted, what it costs.

python3 -m benchmarks.gpu.offload build DIRECTORY                  needs no GPU
python3 -m benchmarks.gpu.offload run DIRECTORY RESULTS.jsonl      under a minute

Each variant of the dense model of 0.9 B parameters takes a few steps on the same batches, with CUDA graphs from the
second on. A row says seconds a step beside those of the package as it is (`plain`), the measured peak beside the
predicted one, and whether all losses, gradients and norms equal those of that package. Exit status 1 where they do not.
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
    "recompute": {"recompute": "full"},
    "budget": {"memory_budget": "20GiB"},
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


def measured(path: Path, device: torch.device) -> tuple[float, int, list[Tensor]]:
    """Seconds and peak bytes of a package, and what is to be equal, on the host: losses, norms, the last gradients."""
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
    return seconds, torch.cuda.max_memory_allocated(), [tensor.cpu() for tensor in found]


def run(directory: Path, results: Path) -> bool:
    """A row per variant; whether all give the same."""
    device = rows.gpu()
    predicted = json.loads((directory / PREDICTED).read_text(encoding="utf-8"))
    shape = training_models.SHAPES[MODEL]
    workload = f"{MODEL} B{shape.batch} S{shape.length} bf16"
    expected: list[Tensor] = []
    plain: dict[str, float] = {}
    right = True
    for name in VARIANTS:
        gc.collect()
        torch.cuda.empty_cache()
        seconds, peak, found = measured(directory / name, device)
        expected = expected or found
        same = all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        right &= same
        more = {"variant": name, "peak_bytes": peak, "predicted_bytes": predicted[name], "same": same}
        rows.append(results, rows.row("offload", workload, seconds, "seconds", plain, **more))
        plain = plain or {name: seconds}
        print(
            f"{name:12} {seconds * 1e3:8.1f} ms  peak {peak / 2**30:6.2f} GiB, "
            f"{predicted[name] / peak - 1:+.1%} predicted  {'the same' if same else 'DIFFERS'}",
            flush=True,
        )
    return right


def main() -> int:
    """`build` or `run`, with a directory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("build", "run"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("results", type=Path, nargs="?")
    options = parser.parse_args()
    if options.what == "build":
        build(options.directory)
        return 0
    if options.results is None:
        parser.error("run wants RESULTS.jsonl")
    return int(not run(options.directory, options.results))


if __name__ == "__main__":
    sys.exit(main())
