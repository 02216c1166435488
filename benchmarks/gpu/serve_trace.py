"""Output tokens a second of a serve package whose slots are full, and how its steps fit into CUDA graphs (E4).

    python3 -m benchmarks.gpu.serve_trace PACKAGE RESULTS.jsonl [--trace long_prompts] [--profile]

PACKAGE is a serve package for GPUs; its parameters are drawn anew. Measured is a window of a trace of
benchmarks/traces in its stationary state: all slots begin somewhere in their outputs (what they wrote so far is part of
their prompts, and computed before the window), and where one ends, the next of the trace begins. The window is the same
for the package's own buckets and for the two lists of sizes, which are measured one after the other on one engine, a
row each (`variant`; `replayed` is the share of steps that were graphs). The shares of steps in graphs and of padding
over the whole trace need no model: `benchmarks/serve_steps.py` counts them.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import serve_steps as traces
from benchmarks.gpu import rows
from mgraph.codegen.buckets import POLICIES
from mgraph.runtime.serving.engine import Engine
from mgraph.runtime.serving.package_stepper import PackageStepper
from mgraph.runtime.serving.step import Batch, Pending, Sampling
from mgraph.runtime.serving.step_graphs import CudaCapture


class Noted:
    """A package's stepper that notes the shapes of its steps."""

    def __init__(self, stepper: PackageStepper) -> None:
        self.stepper = stepper
        self.shapes: list[traces.Shape] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stepper, name)

    def run(self, batch: Batch, sampling: Sampling) -> Pending:
        """As the stepper does."""
        self.shapes.append(traces.shape_of(batch))
        return self.stepper.run(batch, sampling)


def since_start() -> float:
    """Seconds since this process was started."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return uptime - ticks / os.sysconf("SC_CLK_TCK")


def steps(engine: Engine, count: int) -> None:
    """Make some steps."""
    for _ in range(count):
        engine.step()


def window(engine: Engine, noted: Noted, warm: int, count: int, cuda: bool) -> dict[str, Any]:
    """Tokens a second over `count` steps after `warm` others, in which graphs are made."""
    steps(engine, warm)
    graphs = noted.stepper.graphs
    _wait(cuda)
    first, replayed, made = len(noted.shapes), graphs.replayed if graphs else 0, engine.generated
    started = time.perf_counter()
    steps(engine, count)
    _wait(cuda)
    seconds = time.perf_counter() - started
    shapes = noted.shapes[first:]
    return {
        "tokens_per_second": (engine.generated - made) / seconds,
        "ms_per_step": seconds / count * 1e3,
        "replayed": (graphs.replayed - replayed) / len(shapes) if graphs else 0.0,
        "requests": sum(one.requests for one in shapes) / len(shapes),
    }


def fill(engine: Engine) -> dict[str, float]:
    """Compute what is under way already, until every slot writes; how long it took."""
    started, tokens = time.perf_counter(), 0
    while any(not request.sampled for request in engine.scheduler.running) or not engine.scheduler.running:
        before = sum(request.computed for request in engine.scheduler.running)
        engine.step()
        tokens += max(0, sum(request.computed for request in engine.scheduler.running) - before)
    return {"fill_seconds": time.perf_counter() - started, "fill_tokens": tokens}


def profile(engine: Engine, count: int) -> None:
    """Print which kernels take the time of a step."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        steps(engine, count)
        torch.cuda.synchronize()
    rows = [row for row in found.key_averages() if row.self_device_time_total and row.self_cpu_time_total == 0]
    total = sum(row.self_device_time_total for row in rows)
    print(f"a step: {total / count / 1e3:.2f} ms of kernels")
    for row in sorted(rows, key=lambda row: -row.self_device_time_total)[:12]:
        each, spent = row.self_device_time_total / row.count, row.self_device_time_total / count / 1e3
        print(f"{spent:8.3f} ms  {row.count // count:5d} x {each:8.1f} us  {row.key[:90]}")


def _wait(cuda: bool) -> None:
    if cuda:
        torch.cuda.synchronize()


def main() -> None:
    """Measure, print, and add a row for each policy to the results."""
    options = _options()
    cuda = options.device == "cuda"
    if cuda:
        rows.gpu()
    phases = {"imported": since_start()}
    stepper = PackageStepper(
        options.package,
        None,
        options.slots * options.blocks + 1 if options.blocks else 0,
        options.device,
        max_tokens=options.step_tokens,
        max_requests=options.slots,
    )
    _wait(cuda)
    phases["ready"] = since_start()
    trace = traces.in_the_middle(traces.read(options.trace, options.scale), options.slots)
    noted = Noted(stepper)
    engine = Engine(noted, None)
    sampling = {"temperature": options.temperature, "top_p": options.top_p, "top_k": options.top_k}
    traces.submit(engine, trace, **sampling)
    filled = fill(engine)
    phases["filled"] = since_start()
    print(json.dumps({k: round(v, 2) for k, v in (phases | filled).items()}), flush=True)
    for policy in options.policies:
        buckets = traces.buckets_of(policy, traces.GRAPHS, options.slots)
        if cuda:
            stepper.package.manifest["graph_plan"] = {"buckets": [[b.tokens, b.requests, b.writing] for b in buckets]}
            stepper.graphs = stepper.graphs_of(CudaCapture())
        found = window(engine, noted, options.warm, options.steps, cuda)
        workload = f"{options.package.name}, {options.trace}, {options.slots} slots"
        if options.temperature:
            workload += ", " + ", ".join(f"{name} {number:g}" for name, number in sampling.items())
        how = f"a window of {options.steps} steps of the stationary state, after {options.warm}"
        more = {"variant": policy, "graphs": len(buckets), **found, "how": how, "ready_seconds": phases}
        row = rows.row("E4", workload, more.pop("tokens_per_second"), "tokens/s", **more)
        print(json.dumps(row), flush=True)
        rows.append(options.results, row)
    if options.profile:
        profile(engine, 10)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--trace", default="long_outputs", choices=sorted(traces.SHAPES))
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES)
    parser.add_argument("--slots", type=int, default=traces.SLOTS)
    parser.add_argument("--step-tokens", type=int, default=traces.STEP_TOKENS)
    parser.add_argument("--blocks", type=int, default=0, help="of the cache, for each slot (0: what memory allows)")
    parser.add_argument("--warm", type=int, default=120)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--scale", type=int, default=1, help="divide all lengths by this")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--profile", action="store_true", help="print the kernels of a step")
    return parser.parse_args()


if __name__ == "__main__":
    main()
