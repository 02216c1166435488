"""Run the benchmarks that this machine can run: `make bench`, or `python -m benchmarks [ID ...] [--again]`.

Each id keeps its result as JSON in benchmarks/results; one that is there already is not run again without `--again`.
What needs a GPU is named, with the command that runs it there.
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
BENCHMARKS = {
    "compile_time": "compile time against depth",
    "published_shapes": "mgraph compile of every published shape",
    "cpu_step": "the emitted CPU step against eager PyTorch",
    "serve_storm": "a server in a storm of right, wrong and broken requests, and SIGTERM",
    "serve_steps": "steps of served traces: graphs, padding, the host's time",
}
ON_A_GPU = {
    "rms_norm_h100": "benchmarks.gpu.build_rms_norm DIR (anywhere), then benchmarks.gpu.check_rms_norm DIR FILE",
    "kernels_h200": "benchmarks.gpu.kernels FILE [K5 ...]",
    "training_one_gpu_h200": "benchmarks.gpu.build_training DIR (anywhere), then benchmarks.gpu.training DIR FILE",
    "two_gpus_h200": "benchmarks.gpu.build_two_gpus DIR (anywhere), then benchmarks.gpu.two_gpus DIR FILE by torchrun",
    "decode_h200": "mgraph compile MODEL --for serve (anywhere), then benchmarks.gpu.decode PACKAGE FILE",
    "serve_trace_h200": "mgraph compile MODEL --for serve (anywhere), then benchmarks.gpu.serve_trace PACKAGE FILE",
    "batch_invariance_h200": "mgraph compile MODEL --for serve (anywhere), then benchmarks.gpu.batch_invariance speed "
    "PACKAGE... --results FILE",
    "choices_h200": "benchmarks.gpu.choices FILE (A1)",
    "layer_graphs_h200": "benchmarks.gpu.layer_graphs build DIR (anywhere), then benchmarks.gpu.layer_graphs run DIR "
    "--rows FILE",
    "launches_h200": "benchmarks.gpu.launches FILE",
    "linear_loss_h200": "benchmarks.gpu.linear_loss FILE (K6)",
    "start_up_h200": "mgraph compile MODEL (anywhere), then benchmarks.gpu.start_up PACKAGE FILE",
    "profiled_h200": "mgraph compile MODEL (anywhere), then benchmarks.gpu.profiled PACKAGE FILE",
    "sanitizer_h200": "benchmarks.gpu.sanitize DIR [--prepare: anywhere] --results FILE",
    "offload_h200": "benchmarks.gpu.offload build DIR (anywhere), then benchmarks.gpu.offload run DIR FILE",
    "training_h100": "mgraph compile (anywhere), then benchmarks.gpu.check_training FILE PACKAGE FAMILY:SIZE",
}


def main() -> int:
    """Run what is asked for; exit status 1 where one fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("ids", nargs="*", metavar="ID", help=f"of {', '.join(BENCHMARKS)} (default: all)")
    parser.add_argument("--again", action="store_true", help="run also what has a result")
    options = parser.parse_args()
    unknown = [i for i in options.ids if i not in BENCHMARKS]
    if unknown:
        parser.error(f"unknown benchmark {unknown[0]}; there are {', '.join(BENCHMARKS)}")
    status = {}
    for name in options.ids or BENCHMARKS:
        file = RESULTS / f"{name}.json"
        if file.exists() and not options.again:
            status[name] = f"kept from {datetime.date.fromtimestamp(file.stat().st_mtime)}"
            continue
        print(f"== {name}: {BENCHMARKS[name]}", flush=True)
        done = subprocess.run([sys.executable, "-m", f"benchmarks.{name}", "--results", str(file)])
        status[name] = "done" if done.returncode == 0 else f"failed with exit code {done.returncode}"
    print("\n| benchmark | what | status |\n|---|---|---|")
    for name, state in status.items():
        print(f"| {name} | {BENCHMARKS[name]} | {state} |")
    for name, command in ON_A_GPU.items():
        print(f"| {name} | needs a GPU | python -m {command} |")
    return any(state.startswith("failed") for state in status.values())


if __name__ == "__main__":
    sys.exit(main())
