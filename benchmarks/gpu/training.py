"""Training on one GPU against eager PyTorch, torch.compile and transformers: E1a, E1b, E2a, E2b.

    python3 -m benchmarks.gpu.training PACKAGES RESULTS.jsonl [dense] [llama8] [moe] [qwen30] [--peers eager,...]

PACKAGES is what `benchmarks.gpu.build_training` made. All train the same weights on the same batches, with parameters
and gradients in bf16 and AdamW on f32 masters, which are the weights before they are rounded, and moments. First the
losses of some steps: those of the package may be 1.5 times as far (root mean square of the relative differences) from
an f32 run of eager PyTorch as those of eager bf16 are, or it is not timed. Then the seconds of a step: the median over
blocks of steps, with no wait for the GPU within one, as in a run. `fraction` is the model's floating-point operations
per second over the rate of a bf16 product of 8192^3. `until_first_step` is in seconds, from making the model on.
Exit status 1 on any complaint.
"""

from __future__ import annotations

import argparse
import gc
import math
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import peers, rows
from benchmarks.gpu.training_models import SHAPES, Batch, Shape
from mgraph.runtime import mesh
from mgraph.runtime.package import load_package
from mgraph.runtime.state import create_state

IDS = {"dense": "E1a", "llama8": "E1b", "moe": "E2a", "qwen30": "E2b"}
CHECKED = 8
CHECKED_LENGTH = 1024
MOST_NOISE = 1.5
BLOCK = 5
MODES = ("eager", "default", "max-autotune-no-cudagraphs")
OURS, TUNED = "ours", "ours, tuned"
PEERS = (*MODES, "transformers", "liger")


def packaged(path: Path, device: torch.device, weights: dict[str, Tensor], tuned: bool = False) -> peers.Step:
    """The step of a package, its products `tuned` or not; `weights` takes its parameters as they were drawn, in f32."""
    mesh._current = mesh.Mesh(0, 1, device, {})
    package = load_package(path, device.type, tuned=tuned)
    state = create_state(package.state_specs, 0, device)
    for name, tensor in state.items():
        if name.endswith(".master"):
            weights[name.removesuffix(".master")] = tensor.cpu().clone()
    lr = torch.tensor(peers.LR, device=device)

    def step(batch: Batch) -> Tensor:
        package.call("microbatch", state, *batch)
        return package.call("finish", state, lr)["loss"]

    return step


def losses_of(step: peers.Step, batches: Sequence[Batch]) -> list[float]:
    """The losses of training on some batches."""
    return [float(step(batch)) for batch in batches]


def timed(step: peers.Step, batches: Sequence[Batch], steps: int) -> float:
    """Median seconds of a step over blocks of steps."""
    return statistics.median(block_seconds(step, batches) for _ in range(0, steps, BLOCK))


def block_seconds(step: peers.Step, batches: Sequence[Batch]) -> float:
    """Seconds of a step, over a block of them."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for index in range(BLOCK):
        step(batches[index % len(batches)])
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / BLOCK


def timed_in_turns(steps: dict[str, peers.Step], batches: Sequence[Batch], count: int) -> dict[str, float]:
    """Median seconds of a step of each, over blocks in turns, each after one that is not counted: a GPU that is at its
    power limit slows down as it gets warm, so who comes when would decide."""
    taken: dict[str, list[float]] = {variant: [] for variant in steps}
    for _ in range(0, count, BLOCK):
        for variant, step in steps.items():
            block_seconds(step, batches)
            taken[variant].append(block_seconds(step, batches))
    return {variant: statistics.median(seconds) for variant, seconds in taken.items()}


def distance(found: Sequence[float], exact: Sequence[float]) -> float:
    """Root mean square of the relative differences."""
    return math.sqrt(statistics.fmean((a / b - 1) ** 2 for a, b in zip(found, exact, strict=True)))


def released() -> None:
    """Give memory back that nothing holds."""
    gc.collect()
    torch.cuda.empty_cache()


def figures(shape: Shape, seconds: float) -> dict[str, float]:
    """What a step's time is in tokens and operations a second."""
    tokens, operations = shape.batch * shape.length / seconds, shape.flops() / seconds
    return {"seconds": seconds, "tokens_per_second": tokens, "flops_per_second": operations}


def tell(of: str, seen: dict[str, Any]) -> None:
    """Print what was measured."""
    print(
        f"{of:46} {seen['seconds'] * 1e3:8.2f} ms {seen['tokens_per_second']:10,.0f} tokens/s "
        f"{seen['flops_per_second'] / 1e12:6.1f} TFLOP/s peak {seen['peak_bytes'] / 2**30:.1f} GiB "
        f"first {seen['until_first_step']:.1f} s",
        flush=True,
    )


def compare(
    found: dict[str, dict[str, Any]], name: str, path: Path, options: argparse.Namespace, wanted: Sequence[str]
) -> list[str]:
    """Put what is measured of a model into `found`, by variant and each as soon as it is there; complaints. What is
    further from f32 than it may be is not timed."""
    device, shape = rows.gpu(), SHAPES[name]
    batches = shape.batches(0, CHECKED, device)
    weights: dict[str, Tensor] = {}
    makers: dict[str, Callable[[], peers.Step]] = {OURS: lambda: packaged(path, device, weights)}
    if options.tune_products:
        makers[TUNED] = lambda: packaged(path, device, {}, tuned=True)
    complaints, distances = ([], {}) if options.unchecked else gate(name, makers, weights, device)
    makers = {variant: make for variant, make in makers.items() if distances.get(variant, {}).get("is_near", True)}
    makers |= {kind: make for kind, make in peers_of(shape, weights, device).items() if kind in wanted}
    alive: dict[str, peers.Step] = {}
    for variant, make in makers.items():
        step: peers.Step | None = None  # what the last one holds is not this one's
        released()
        torch.cuda.reset_peak_memory_stats()
        held, begun = torch.cuda.memory_allocated(), time.perf_counter()
        try:
            step = make()
            first = float(step(batches[0]))
            started = time.perf_counter() - begun
            losses = [first, *losses_of(step, batches[1:])]
            seconds, peak = timed(step, batches, options.steps), torch.cuda.max_memory_allocated() - held
        except Exception as error:  # a peer that does not run is a result, and the others go on
            complaints.append(f"{name}, {variant}: {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}")
            continue
        seen = {"peak_bytes": peak, "until_first_step": started, "losses": losses, **distances.get(variant, {})}
        found[variant] = figures(shape, seconds) | seen
        tell(f"{name:7} {variant}", found[variant])
        if options.in_turns:
            alive[variant] = step
    for variant, seconds in timed_in_turns(alive, batches, options.steps).items():
        found[variant] |= figures(shape, seconds) | {"seconds_after_the_other": found[variant]["seconds"]}
        tell(f"{name:7} {variant}, in turns", found[variant])
    alive.clear()
    released()
    return complaints


def peers_of(shape: Shape, weights: dict[str, Tensor], device: torch.device) -> dict[str, Callable[[], peers.Step]]:
    """What makes each peer, of weights that are there by then."""
    low = torch.bfloat16
    made: dict[str, Callable[[], peers.Step]] = {
        mode: lambda m=mode: peers.plain(shape, weights, low, device, "" if m == "eager" else m)  # type: ignore[misc]
        for mode in MODES
    }
    made["transformers"] = lambda: peers.transformers_compiled(shape, weights, low, device)
    made["liger"] = lambda: peers.liger(shape, weights, low, device)
    return made


def gate(
    name: str, makers: dict[str, Callable[[], peers.Step]], weights: dict[str, Tensor], device: torch.device
) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Complaints; and, of each variant of ours, how far its losses and those of eager bf16 are from eager f32, over
    steps on shorter batches: f32 has no fused attention for grouped heads, and would not fit."""
    torch.backends.cuda.matmul.allow_tf32 = False
    shape = SHAPES[name]
    batches = [(t[:1, :CHECKED_LENGTH], s[:1, :CHECKED_LENGTH]) for t, s in shape.batches(0, CHECKED, device)]
    losses: dict[str, list[float]] = {}
    eager: dict[str, Callable[[], peers.Step]] = {
        "f32": lambda: peers.plain(shape, weights, torch.float32, device, ""),
        "bf16": lambda: peers.plain(shape, weights, torch.bfloat16, device, ""),
    }
    for variant, make in (makers | eager).items():
        released()
        losses[variant] = losses_of(make(), batches)
    complaints, found = [], {}
    noise = distance(losses["bf16"], losses["f32"])
    for variant in makers:
        off = distance(losses[variant], losses["f32"])
        near = off <= MOST_NOISE * noise
        print(f"{name}, {variant}: from f32 by {off:.2e}, eager bf16 by {noise:.2e}", flush=True)
        found[variant] = {"distance_from_f32": off, "distance_of_eager": noise, "is_near": near}
        if not near:
            complaints.append(f"{name}, {variant}: losses are {off:.2e} from f32, those of eager bf16 {noise:.2e}")
    return complaints, found


def beside_seconds(seen: dict[str, Any]) -> dict[str, Any]:
    """What else was measured."""
    return {name: value for name, value in seen.items() if name != "seconds"}


def write(found: dict[str, dict[str, Any]], name: str, shape: Shape, limits: dict[str, float], results: Path) -> None:
    """A row for each variant of ours, beside what was measured of others; and say how they compare."""
    others = {variant: seen for variant, seen in found.items() if variant not in (OURS, TUNED)}
    times = {variant: seen["seconds"] for variant, seen in others.items()}
    for variant in (OURS, TUNED):
        if variant not in found:
            continue
        told = {"variant": "tuned products"} if variant == TUNED else {}
        made = rows.row(
            IDS[name],
            f"{name} B{shape.batch} S{shape.length} bf16",
            found[variant]["seconds"],
            "seconds",
            times,
            {peer: beside_seconds(seen) for peer, seen in others.items()},
            **told,
            **beside_seconds(found[variant]),
            fraction=found[variant]["flops_per_second"] / limits["matmul"],
            limit="matmul",
            **limits,
        )
        rows.append(results, made)
        if times:
            print(f"{IDS[name]}, {variant}: {made['ratio']:.3f} x {made['peer_name']}", flush=True)


def main() -> int:
    """Compare the models asked for; a row of results each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("models", nargs="*", default=["dense", "llama8"])
    parser.add_argument("--peers", default=",".join(PEERS), help="comma-separated")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--unchecked", action="store_true", help="leave out the f32 run")
    parser.add_argument("--tune-products", action="store_true", help="measure ours with tuned products, too")
    parser.add_argument("--in-turns", action="store_true", help="keep all in memory, and take their times in turns")
    options = parser.parse_intermixed_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what is measured then is written
    device = rows.gpu()
    limits = {"copy": rows.copy_rate(device), "matmul": rows.matmul_rate(device)}
    print(f"{rows.card()}: copy {limits['copy'] / 1e12:.2f} TB/s, matmul {limits['matmul'] / 1e12:.0f} TFLOP/s")
    complaints: list[str] = []
    for name in options.models:
        wanted = [peer for peer in options.peers.split(",") if peer]
        found: dict[str, dict[str, Any]] = {}
        package = options.packages / name
        try:
            complaints += compare(found, name, package, options, wanted)
        finally:
            write(found, name, SHAPES[name], limits, options.results)
    print("\n".join(complaints) or "all losses agree", flush=True)
    return bool(complaints)


if __name__ == "__main__":
    sys.exit(main())
