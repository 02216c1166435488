"""Offloading and recomputation on a GPU: the same losses and gradients bit for bit, memory as predicted, what it costs.

python3 -m benchmarks.gpu.offload build DIRECTORY                  needs no GPU
python3 -m benchmarks.gpu.offload run DIRECTORY RESULTS.jsonl [VARIANT …]      about a minute

Each variant of the dense model of 0.9 B parameters takes a few steps on the same batches, with CUDA graphs from the
second on. A row says seconds a step beside those of the package as it is (`plain`), the measured peak beside the
predicted one, and whether losses, norms and the state after some steps equal those of that package; these steps are
taken by deterministic algorithms, for attention as packages run it does not repeat its own gradients. Exit status 1
where they do not.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import rows, training_models
from mgraph.compiler import compile_package
from mgraph.recipe import Recipe
from mgraph.runtime.package import load_package
from mgraph.runtime.state import State, create_state

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
WARM = 3
"""Steps before those that are timed: one that launches, one that captures, one more."""
TIMED = 5
EXACT = 3
"""Steps of which the results are compared."""
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


def trained(path: Path, device: torch.device, count: int) -> Iterator[State]:
    """Train some steps: what each gave, and the state after it."""
    package = load_package(path, device)
    state = create_state(package.state_specs, 0, device)
    for batch in training_models.SHAPES[MODEL].batches(0, count, device):
        given = package.call("microbatch", state, *batch)
        yield given | package.call("finish", state, torch.tensor(1e-4, device=device)) | state


def exact(path: Path, device: torch.device) -> list[State]:
    """What is to be equal, after each of some steps by algorithms that repeat their results: losses, norms, and the
    state of the last step."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        return list(trained(path, device, EXACT))
    finally:
        torch.use_deterministic_algorithms(False)


def equal(found: list[State], expected: list[State], device: torch.device) -> bool:
    """Whether all is the same to the bit, wherever it lies."""
    return all(
        torch.equal(after[name].to(device), tensor.to(device))
        for after, before in zip(found, expected, strict=True)
        for name, tensor in before.items()
    )


def measured(path: Path, device: torch.device) -> tuple[float, int]:
    """Seconds of a step, and the peak of the package's bytes, as it runs."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()  # workspaces that libraries keep for streams of packages that are gone
    begun = 0.0
    for index, _ in enumerate(trained(path, device, WARM + TIMED)):
        if index in (WARM - 1, WARM + TIMED - 1):
            torch.cuda.synchronize()
            begun = time.perf_counter() - begun
    return begun / TIMED, torch.cuda.max_memory_allocated() - before


def run(directory: Path, results: Path, variants: list[str]) -> bool:
    """A row per variant, of which the first is the plain one; whether all give the same."""
    device = rows.gpu()
    predicted = json.loads((directory / PREDICTED).read_text(encoding="utf-8"))
    shape = training_models.SHAPES[MODEL]
    workload = f"{MODEL} B{shape.batch} S{shape.length} bf16"
    expected: list[State] = []
    plain: dict[str, float] = {}
    right = True
    for name in variants:
        seconds, peak = measured(directory / name, device)
        found = exact(directory / name, device)
        expected = expected or found
        same = equal(found, expected, device)
        del found
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
    parser.add_argument("variants", nargs="*", help=f"some of {', '.join(VARIANTS)}, beside the plain one")
    options = parser.parse_args()
    if options.what == "build":
        build(options.directory)
        return 0
    if options.results is None:
        parser.error("run wants RESULTS.jsonl")
    if unknown := [name for name in options.variants if name not in VARIANTS]:
        parser.error(f"no variants: {', '.join(unknown)}")
    variants = [name for name in VARIANTS if name in ("plain", *(options.variants or VARIANTS))]
    return int(not run(options.directory, options.results, variants))


if __name__ == "__main__":
    sys.exit(main())
