"""Training on one GPU against eager PyTorch, torch.compile and transformers: E1a, E1b, E2a, E2b.

    python3 -m benchmarks.gpu.training PACKAGES RESULTS.jsonl [dense] [llama8] [moe] [qwen30] [--peers eager,...]

PACKAGES is what `benchmarks.gpu.build_training` made. All train the same weights on the same batches, with parameters
and gradients in bf16 and AdamW on f32 masters, which are the weights before they are rounded, and moments. What does
not train as eager bf16 does, within that one's rounding noise (`training_gate.py`), is not timed. Then the seconds of a
step: the median over blocks of steps, with no wait for the GPU within one, as in a run. `fraction` is the model's
floating-point operations per second over the rate of a bf16 product of 8192^3. `until_first_step` is in seconds, from
making the model on, in a process that has trained others before. Exit status 1 on any complaint.
"""

from __future__ import annotations

import argparse
import gc
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import peers, rows, training_gate
from benchmarks.gpu.training_models import SHAPES, Batch, Shape
from mgraph.runtime import mesh
from mgraph.runtime.package import load_package
from mgraph.runtime.state import create_state

IDS = {"dense": "E1a", "llama8": "E1b", "moe": "E2a", "qwen30": "E2b"}
BATCHES = 8
BLOCK = 5
MODES = ("eager", "default", "max-autotune-no-cudagraphs")
OURS, TUNED = "ours", "ours, tuned"
LIGERS = {"liger": False, "liger experts": True}
"""Whether Liger's own experts are among its kernels, which is for those who ask: its first step takes minutes then."""
COMPILED_UPDATE = "compiled update"
"""torch.compile for the optimizer, too, as no recipe of these peers has it: where asked for."""
PEERS = (*MODES, "transformers", "liger")


class Packaged:
    """The step of a package, its products `tuned` or not."""

    def __init__(self, path: Path, device: torch.device, tuned: bool = False) -> None:
        mesh._current = mesh.Mesh(0, 1, device, {})
        self._package = load_package(path, device.type, tuned=tuned)
        self._state = create_state(self._package.state_specs, 0, device)
        self._lr = torch.tensor(peers.LR, device=device)

    def __call__(self, batch: Batch) -> Tensor:
        """Train a step; the loss."""
        self._package.call("microbatch", self._state, *batch)
        return self._package.call("finish", self._state, self._lr)["loss"]

    def gradients(self, batch: Batch) -> training_gate.Gradients:
        """The gradients of the mean loss; those of the state are of the sum over all tokens, and stay there."""
        self._package.call("microbatch", self._state, *batch)
        found = {name: self._state.get(f"{name}.grad") for name in self._of_kind("param")}
        return {name: grad.float() / batch[1].numel() for name, grad in found.items() if grad is not None}

    def restart(self, weights: training_gate.Weights) -> None:
        """Begin again, from these weights and buffers."""
        for spec in self._package.state_specs:
            tensor = self._state[spec.name]
            if spec.kind in ("param", "master", "buffer"):
                tensor.copy_(weights[spec.name.removesuffix(".master")])
            elif spec.kind == "scalar":
                tensor.copy_(create_state([spec], 0, tensor.device)[spec.name])
            else:
                tensor.zero_()

    def _of_kind(self, kind: str) -> set[str]:
        return {spec.name for spec in self._package.state_specs if spec.kind == kind}


def drawn(path: Path, device: torch.device) -> dict[str, Tensor]:
    """The parameters of a package as they are drawn, in f32, and its buffers, on the CPU."""
    specs = load_package(path, device.type).state_specs
    wide = {spec.name.removesuffix(".master") for spec in specs if spec.kind == "master"}
    taken = [s for s in specs if s.kind in ("master", "buffer") or (s.kind == "param" and s.name not in wide)]
    return {name.removesuffix(".master"): t.cpu() for name, t in create_state(taken, 0, device).items()}


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
    """Put what is measured of a model into `found`, by variant and each as soon as it is there; complaints."""
    device, shape = rows.gpu(), SHAPES[name]
    batches = shape.batches(0, BATCHES, device)
    weights = drawn(path, device)
    gate = None if options.unchecked else Gate(name, training_gate.reference(shape, weights, device), weights)
    makers: dict[str, Callable[[], peers.Step]] = {OURS: lambda: Packaged(path, device)}
    if options.tune_products:
        makers[TUNED] = lambda: Packaged(path, device, tuned=True)
    makers |= {kind: make for kind, make in peers_of(shape, weights, device).items() if kind in wanted}
    complaints: list[str] = []
    alive: dict[str, peers.Step] = {}
    for variant, make in makers.items():
        step: peers.Step | None = None  # what the last one holds is not this one's
        released()
        try:
            held, begun = torch.cuda.memory_allocated(), time.perf_counter()
            step = make()
            losses = [float(step(batches[0]))]
            started = time.perf_counter() - begun
            torch.cuda.reset_peak_memory_stats()
            losses.append(float(step(batches[1])))  # a package captures its graphs then, and allocates no more later on
            peak = torch.cuda.max_memory_allocated() - held
            judged: dict[str, Any] = {}
            if gate is not None and isinstance(step, Packaged):
                judged = gate.judge(variant, step, batches[0])
                if not judged["is_near"]:
                    complaints.append(f"{name}, {variant}: is further from f32 than eager bf16 is")
                    continue
                losses = losses_of(step, batches[:2])  # from the start again
            losses += losses_of(step, batches[2:])
            seconds = timed(step, batches, options.steps)
        except Exception as error:  # a peer that does not run is a result, and the others go on
            complaints.append(f"{name}, {variant}: {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}")
            continue
        seen = {"peak_bytes": peak, "until_first_step": started, "losses": losses, **judged}
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


class Gate:
    """Says of each variant of a package how near to f32 it trains. Of a whole batch, whose products are those that are
    tuned, the gradients of variants are compared with each other: f32 would not fit."""

    def __init__(self, name: str, reference: training_gate.Reference, weights: dict[str, Tensor]) -> None:
        self._name, self._reference, self._weights = name, reference, weights
        self._whole: training_gate.Gradients = {}

    def judge(self, variant: str, step: Packaged, batch: Batch) -> dict[str, Any]:
        """What `training_gate` says, and what it has of a whole batch. The step has started again by then."""
        judged = self._reference.judge(step, self._weights)
        step.restart(self._weights)
        whole = {name: grad.to("cpu", torch.bfloat16) for name, grad in step.gradients(batch).items()}
        step.restart(self._weights)
        if self._whole:
            worst, _ = self._reference.farthest(whole, self._whole)
            judged["gradients_times_eager_of_a_batch"] = worst
            judged["is_near"] &= worst <= training_gate.MOST_NOISE
        self._whole = self._whole or whole
        print(f"{self._name}, {variant}: {judged}", flush=True)
        return judged


def peers_of(shape: Shape, weights: dict[str, Tensor], device: torch.device) -> dict[str, Callable[[], peers.Step]]:
    """What makes each peer, of weights that are there by then."""
    low = torch.bfloat16
    made: dict[str, Callable[[], peers.Step]] = {
        mode: lambda m=mode: peers.plain(shape, weights, low, device, "" if m == "eager" else m)  # type: ignore[misc]
        for mode in MODES
    }
    made[COMPILED_UPDATE] = lambda: peers.plain(shape, weights, low, device, "default", update=True)
    made["transformers"] = lambda: peers.transformers_compiled(shape, weights, low, device)
    for name, experts in LIGERS.items():
        made[name] = lambda e=experts: peers.liger(shape, weights, low, device, experts=e)  # type: ignore[misc]
    return made


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
    parser.add_argument(
        "--peers", default=",".join(PEERS), help=f"comma-separated; also 'liger experts', '{COMPILED_UPDATE}'"
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--unchecked", action="store_true", help="leave out the gate")
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
    print("\n".join(complaints) or "all train as eager bf16 does", flush=True)
    return bool(complaints)


if __name__ == "__main__":
    sys.exit(main())
