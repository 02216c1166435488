"""A step launched op by op, in graphs of layers, and in one graph for each entry: the same bits, and seconds of each.

python3 -m benchmarks.gpu.layer_graphs build DIRECTORY                 needs no GPU
python3 -m benchmarks.gpu.layer_graphs run DIRECTORY [--rows FILE]     some minutes

Everything is run by deterministic algorithms, without cuDNN's attention, and as packages run, with it where they chose
it. Of the latter launches are run twice: where these differ from each other it says so, as no graph can be the same.

Two models of 8 layers of width 512: a dense one, and one with experts of which the host reads how many rows come, so
that no entry can be one graph. Of its two ranks one is run by itself: what it sends comes back as what the other sent.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import rows
from mgraph import models
from mgraph.compiler import compile_package
from mgraph.recipe import Recipe
from mgraph.runtime.mesh import Mesh
from mgraph.runtime.package import Package, State, load_package
from mgraph.runtime.state import create_state

SHAPE = {"d_model": 512, "num_layers": 8, "num_heads": 8, "num_kv_heads": 8, "vocab_size": 8192}
BUILDS: dict[str, dict[str, Any]] = {
    "dense-whole": {},
    "dense-layers": {"cuda_graphs": "layers"},
    "moe-layers": {"mesh": "ep=2", "expert_extent": "host"},
}
WAYS: dict[str, dict[str, tuple[str, bool]]] = {
    "dense": {"launches": ("dense-whole", False), "layers": ("dense-layers", True), "whole": ("dense-whole", True)},
    "moe": {"launches": ("moe-layers", False), "layers": ("moe-layers", True)},
}
"""How a model is run: the package, and whether there are graphs."""
SIZES = ((1, 256), (4, 1024))
WARM, STEPS, TURNS = 4, 10, 3


def dense() -> torch.nn.Module:
    """Eight layers."""
    return models.get("dense", "tiny", d_ff=1408, **SHAPE)


def moe() -> torch.nn.Module:
    """Eight layers of eight experts."""
    return models.get("moe", "tiny", d_ff=512, **SHAPE)


def build(directory: Path) -> None:
    """Compile the packages."""
    for name, more in BUILDS.items():
        model = f"{__file__}:{name.partition('-')[0]}"
        settings = {
            "precision": "bf16",
            "target": "h100",
            "batch": 1,
            "seq": 256,
            "output": str(directory / name),
            **more,
        }
        print(compile_package(Recipe(model, **settings), force=True).package, flush=True)


class Run:
    """A package with its state, and the same batch in each step."""

    def __init__(self, path: Path, graphs: bool, batch: int, length: int) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self.package: Package = load_package(path, device, cuda_graphs=graphs)
        axes = {name: size for name, size in self.package.manifest["mesh"].items() if isinstance(size, int)}
        lone = Mesh(0, 2 if axes else 1, device, axes)
        self.state: State = create_state(self.package.state_specs, 0, device, mesh=lone)
        drawn = torch.randint(self.package.vocab_size, (batch, length + 1), generator=torch.Generator().manual_seed(0))
        self.inputs = [drawn[:, :-1].to(device), drawn[:, 1:].to(device)]
        self.rate = torch.tensor(1e-4, device=device)

    def step(self) -> Tensor:
        """One step; its loss."""
        self.package.call("microbatch", self.state, *self.inputs)
        return self.package.call("finish", self.state, self.rate)["loss"]

    def seconds(self) -> float:
        """Of a step, the median of some turns."""
        found = []
        for _ in range(TURNS):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for _ in range(STEPS):
                self.step()
            torch.cuda.synchronize()
            found.append((time.perf_counter() - begun) / STEPS)
        return statistics.median(found)


def measured(path: Path, graphs: bool, batch: int, length: int) -> tuple[float, int, dict[str, Tensor]]:
    """Seconds of a step, bytes of its peak, and the state after the first ones, on the host."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run = Run(path, graphs, batch, length)
    for _ in range(WARM):
        run.step()
    state = {name: tensor.cpu() for name, tensor in run.state.items()}
    return run.seconds(), torch.cuda.max_memory_reserved(), state


def differs(state: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Whether something is not the same to the bit."""
    return not all(torch.equal(tensor, state[name]) for name, tensor in expected.items())


def run(directory: Path, file: Path | None) -> None:
    """A line per model, size and way; exit code 1 where a state differs from that of launches that repeat theirs."""
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    wrong = []
    for deterministic, model, (batch, length) in itertools.product((True, False), WAYS, SIZES):
        torch.use_deterministic_algorithms(deterministic)
        by = "deterministic" if deterministic else "as packages run"
        ways = WAYS[model]
        found = {way: measured(directory / name, on, batch, length) for way, (name, on) in ways.items()}
        launched, _, expected = found["launches"]
        again = directory / ways["launches"][0]
        repeats = deterministic or not differs(measured(again, False, batch, length)[2], expected)
        workload = f"{model}, 8 layers of width 512, B{batch} S{length} bf16"
        for way, (seconds, peak, state) in found.items():
            same = not differs(state, expected)
            wrong += [f"{workload} {way} {by}"] if repeats and not same else []
            said = "the same" if same else "DIFFERS" if repeats else "differs, as launches do from each other"
            told = f"{seconds * 1e3:8.3f} ms, {peak / 2**20:6.0f} MiB  {said}"
            print(f"{workload:48} {by:15} {way:9} {told}", flush=True)
            if file is not None and same and way != "launches":
                named, peers = way if deterministic else f"{way}, {by}", {"launches": launched}
                made = rows.row("graphs", workload, seconds, "seconds", peers, variant=named, peak_bytes=peak)
                rows.append(file, made)
    sys.exit(bool(wrong))


def main() -> None:
    """`build` or `run`, with a directory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("build", "run"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rows", type=Path, help="the file that gets a row for each")
    options = parser.parse_args()
    if options.what == "build":
        build(options.directory)
    else:
        rows.gpu()
        run(options.directory, options.rows)


if __name__ == "__main__":
    main()
