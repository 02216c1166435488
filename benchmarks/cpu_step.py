"""The emitted training step against eager PyTorch on the CPU: time and memory, for both families and two sizes.

    python3 -m benchmarks.cpu_step [--models dense-tiny,moe-100m] [--threads 2] [--results FILE]

Both sides do one whole step on the same batch from the same weights: forward, backward, clipping to norm 1, AdamW.
Eager is the model class as it stands, with `cross_entropy`, `clip_grad_norm_`, the fused `torch.optim.AdamW` and
`zero_grad(set_to_none=True)`.

* Gate: loss and every gradient agree with autograd to 1e-4 (relative, 2-norm); otherwise nothing is timed.
* Time: medians of single steps, the sides in turn (A B B A) in one process with the same number of threads.
* Memory: each side in a process of its own. After one warm-up step, the largest resident memory over two more, less
  what was resident before weights were made: weights, moments, gradients and activations all count. Before that both
  processes run one eager step of a small model, so that what torch loads on first use counts for neither. Needs Linux.

Ratios are eager / emitted for time (above 1: the emitted step is faster) and emitted / eager for memory.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mgraph import models
from mgraph.runtime.package import Package, load_package
from mgraph.runtime.state import create_state

RESULTS = Path(__file__).parent / "results" / "cpu_step.json"
TOLERANCE = 1e-4
LEARNING_RATE = 1e-3
VOCABULARY = 256
Step = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A model with its batch, and how many times the pattern A B B A is run."""

    name: str
    batch: int
    seq: int
    rounds: int
    warmup: int

    def eager(self) -> nn.Module:
        """The model, with weights of its own."""
        return models.get(*self.name.split("-", 1))

    def data(self) -> tuple[Tensor, Tensor]:
        """Random tokens and labels, i64[B, S], some labels masked."""
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(VOCABULARY, (self.batch, self.seq + 1), generator=generator)
        labels = rows[:, 1:].clone()
        labels[:, :2] = -100
        return rows[:, :-1].contiguous(), labels


CASES = (
    Case("dense-tiny", batch=8, seq=128, rounds=20, warmup=5),
    Case("moe-tiny", batch=8, seq=128, rounds=20, warmup=5),
    Case("dense-100m", batch=1, seq=256, rounds=3, warmup=1),
    Case("moe-100m", batch=1, seq=256, rounds=3, warmup=1),
)


@dataclass(frozen=True)
class Result:
    """Medians of one case: seconds a step, bytes of peak memory, and the largest relative error of the gate."""

    model: str
    batch: int
    seq: int
    error: float
    eager_seconds: float
    emitted_seconds: float
    time_ratio: float
    eager_bytes: int
    emitted_bytes: int
    memory_ratio: float


def compile_case(case: Case, directory: Path) -> Path:
    """The case's training package for the CPU, under `directory`."""
    from mgraph.codegen.package import PackageInfo, emit_package
    from mgraph.compiler import build_module, pipeline_text
    from mgraph.recipe import Recipe

    recipe = Recipe(model=case.name, output=str(directory / case.name), target="cpu", beta2=0.999)
    module = build_module(recipe).module
    return emit_package(module, PackageInfo(recipe.purpose, recipe, pipeline_text(recipe)), recipe.directory)


def emitted_step(case: Case, package: Package, state: dict[str, Tensor]) -> Step:
    """One optimizer step of the package, as the trainer makes it."""
    tokens, labels = case.data()
    rate = torch.tensor(LEARNING_RATE)

    def step() -> object:
        package.call("microbatch", state, tokens, labels)
        return package.call("finish", state, rate)["loss"]

    return step


def eager_step(case: Case, model: nn.Module) -> Step:
    """One optimizer step of eager PyTorch; matrices decay, vectors do not, as in the package."""
    tokens, labels = case.data()
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.01},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.999), fused=True)

    def step() -> object:
        optimizer.zero_grad(set_to_none=True)
        loss = cross_entropy(model(tokens).flatten(0, 1).float(), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return loss

    return step


def largest_error(case: Case, package: Package, state: dict[str, Tensor], model: nn.Module) -> float:
    """The largest relative error of loss and gradients against autograd; the model takes the state's weights.

    The state's gradients are zero before and after.
    """
    tokens, labels = case.data()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state[name])
    loss = cross_entropy(model(tokens).flatten(0, 1).float(), labels.flatten(), reduction="sum")
    loss.backward()
    found = package.call("microbatch", state, tokens, labels)["loss_sum"]
    errors = [_relative(found, loss.detach())]
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has a gradient"
        errors.append(_relative(state[f"{name}.grad"], parameter.grad))
    model.zero_grad(set_to_none=True)
    for spec in package.state_specs:
        if spec.kind == "grad" or spec.name.startswith("acc."):
            state[spec.name].zero_()
    return max(errors)


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def times(first: Step, second: Step, case: Case) -> tuple[float, float]:
    """Median seconds of a step of each, in turn."""
    seconds: dict[Step, list[float]] = {first: [], second: []}
    for _ in range(case.warmup):
        first()
        second()
    for _ in range(case.rounds):
        for step in (first, second, second, first):
            start = time.perf_counter()
            step()
            seconds[step].append(time.perf_counter() - start)
    return statistics.median(seconds[first]), statistics.median(seconds[second])


def resident(field: str) -> int:
    """Bytes of this process's memory: `VmRSS` now, `VmHWM` the most since `forget_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"the system does not report {field}")


def forget_peak() -> None:
    """Let `VmHWM` start again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def measure_memory(case: Case, side: str, path: Path) -> int:
    """Peak bytes of one side, in this process."""
    package = load_package(path, "cpu")
    small = Case("dense-tiny", batch=1, seq=4, rounds=0, warmup=0)
    eager_step(small, small.eager())()
    gc.collect()
    before = resident("VmRSS")
    if side == "eager":
        step = eager_step(case, case.eager())
    else:
        step = emitted_step(case, package, create_state(package.state_specs, 0, "cpu"))
    step()
    forget_peak()
    step()
    step()
    return resident("VmHWM") - before


def peak(case: Case, side: str, path: Path, threads: int) -> int:
    """`measure_memory` in a process of its own."""
    command = [sys.executable, "-m", __spec__.name, "--threads", str(threads)]
    command += ["--models", case.name, "--memory", side, "--package", str(path)]
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def measure(case: Case, directory: Path, threads: int) -> Result:
    """Compile, gate, time and weigh one case."""
    path = compile_case(case, directory)
    package = load_package(path, "cpu")
    state, model = create_state(package.state_specs, 0, "cpu"), case.eager()
    error = largest_error(case, package, state, model)
    if not error <= TOLERANCE:
        raise SystemExit(f"{case.name}: the emitted step differs from eager by {error:.1e} > {TOLERANCE:.0e}")
    eager, emitted = times(eager_step(case, model), emitted_step(case, package, state), case)
    del state, model
    eager_bytes, emitted_bytes = (peak(case, side, path, threads) for side in ("eager", "emitted"))
    return Result(
        case.name, case.batch, case.seq, error,
        eager, emitted, eager / emitted,
        eager_bytes, emitted_bytes, emitted_bytes / eager_bytes,
    )  # fmt: skip


def processor() -> str:
    """The processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def report(results: list[Result], threads: int) -> dict[str, Any]:
    """What the result file holds."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "processor": processor(),
        "threads": threads,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "results": [asdict(result) for result in results],
    }


def print_row(result: Result) -> None:
    """One line of the table."""
    print(
        f"{result.model:<12} B {result.batch} S {result.seq:<4} error {result.error:.1e}   "
        f"eager {result.eager_seconds * 1e3:8.2f} ms  emitted {result.emitted_seconds * 1e3:8.2f} ms  "
        f"eager/emitted {result.time_ratio:.3f}   "
        f"eager {result.eager_bytes / 2**20:7.1f} MiB  emitted {result.emitted_bytes / 2**20:7.1f} MiB  "
        f"emitted/eager {result.memory_ratio:.3f}",
        flush=True,
    )


def main() -> None:
    """Run the cases asked for; write the results when all ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(case.name for case in CASES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--memory", choices=("eager", "emitted"), help=argparse.SUPPRESS)
    parser.add_argument("--package", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    cases = [case for case in CASES if case.name in options.models.split(",")]
    if options.memory:
        print(measure_memory(cases[0], options.memory, options.package))
        return
    with tempfile.TemporaryDirectory() as directory:
        results = []
        for case in cases:
            results.append(measure(case, Path(directory), options.threads))
            print_row(results[-1])
    options.results.write_text(json.dumps(report(results, options.threads), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
