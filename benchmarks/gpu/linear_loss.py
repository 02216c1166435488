"""The head with its loss and all gradients (K6), of some rows at a time, beside others: errors, time and memory.

    python3 -m benchmarks.gpu.linear_loss RESULTS.jsonl [--budgets 256MiB 512MiB] [--no-peers] [--small]

First every variant computes the loss, dx and dweight of fewer rows, some of them ignored and of which chunks leave a
rest, and is compared with float64: the errors of others are said, ours must be small. Then the median seconds of a call
on 8192 rows of 4096 and a vocabulary of 128256 in bf16. `fraction` is the rate of the three products over that of a
product of 8192^3 in this run. `extra_bytes` is the peak of memory over what there was before and what the call
leaves: dx, and the gradient of the weight where it is not added in f32 to a total that is there, as ours is. `--small`
is for a machine without a GPU and measures nothing of use. Exit status 1 on any complaint.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.kernels import error_of
from benchmarks.gpu.rows import append, card, gpu, matmul_rate, row
from mgraph.codegen.triton import cross_entropy
from mgraph.codegen.triton.aot import build_kernels
from mgraph.ir.graph import Value
from mgraph.ir.types import DType, TensorType
from mgraph.passes.chunk_loss import rows_within
from mgraph.recipe import Recipe
from mgraph.runtime import kernels as runtime
from mgraph.runtime import v1 as rt

BOUND = 1e-2
IGNORED = 16
"""Of so many labels one is to be ignored."""
CALLS = 10
OURS = "ours "
"""How names of our variants begin; the budget follows."""


@dataclass(frozen=True)
class Sizes:
    """Rows, their width, the vocabulary, and the rows on which variants are checked."""

    rows: int = 8192
    width: int = 4096
    vocabulary: int = 128256
    checked: int = 4001


@dataclass(frozen=True)
class Inputs:
    """x [N, D] and weight [V, D] in bf16, labels i64 [N]; total f32 [V, D], to which ours adds."""

    x: Tensor
    weight: Tensor
    labels: Tensor
    total: Tensor


Variant = Callable[[Inputs], tuple[Tensor, Tensor, Tensor | None]]
"""The sum of the losses, dx, and the weight's gradient where it is not added to the total."""


def draw(rows: int, sizes: Sizes, device: torch.device) -> Inputs:
    """Logits of about a normal distribution's size."""
    torch.manual_seed(0)
    x = torch.randn(rows, sizes.width, device=device, dtype=torch.bfloat16)
    weight = torch.randn(sizes.vocabulary, sizes.width, device=device, dtype=torch.bfloat16).mul_(sizes.width**-0.5)
    labels = torch.randint(sizes.vocabulary, (rows,), device=device)
    labels[::IGNORED] = -100
    return Inputs(x, weight, labels, torch.zeros_like(weight, dtype=torch.float32))


def ours(kernel: Callable[..., Any] | None, rows: int, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor | None]:
    """The runtime's form, as packages call it; `kernel` is the site of the loss."""
    dsum = torch.ones((), device=inputs.x.device)
    total, dx = rt.linear_cross_entropy_with_grad_(
        inputs.total, inputs.x, inputs.weight, inputs.labels, dsum, rows=rows, loss=kernel
    )
    return total, dx, None


def by_autograd(
    loss_of: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: Inputs
) -> tuple[Tensor, Tensor, Tensor | None]:
    """A loss of x, weight and labels with its gradients."""
    x, weight = inputs.x.detach().requires_grad_(), inputs.weight.detach().requires_grad_()
    with torch.enable_grad():
        loss = loss_of(x, weight, inputs.labels)
    dx, dweight = torch.autograd.grad(loss, (x, weight))
    return loss.detach(), dx, dweight


def eager(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """As models have it: the loss in f32 at least."""
    logits = F.linear(x, weight)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, labels, reduction="sum")


def peers() -> tuple[dict[str, Variant], list[str]]:
    """Others by name, and which are not installed."""
    found: dict[str, Variant] = {"eager": functools.partial(by_autograd, eager)}
    missing = []
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # type: ignore[import-not-found]

        fused = LigerFusedLinearCrossEntropyLoss(reduction="sum")
        found["liger"] = functools.partial(by_autograd, lambda x, weight, labels: fused(weight, x, labels))
    except ImportError as error:
        missing.append(f"liger is not installed: {error}")
    try:
        from cut_cross_entropy import linear_cross_entropy  # type: ignore[import-not-found]

        cut = functools.partial(linear_cross_entropy, reduction="sum")
        found["cut_cross_entropy"] = functools.partial(by_autograd, cut)
    except ImportError as error:
        missing.append(f"cut_cross_entropy is not installed: {error}")
    return found, missing


def loss_kernel(sizes: Sizes, device: torch.device) -> Callable[..., Any]:
    """The site of the loss, compiled as a package has it."""
    problem = cross_entropy.CrossEntropy(sizes.vocabulary, "bf16")
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        entries = build_kernels([cross_entropy.forward_backward("loss", problem)], directory, ["sm_90a"])
        (directory / "manifest.json").write_text(json.dumps({"kernels": entries}), encoding="utf-8")
        runtime.set_device(device, strict=True)
        site: Callable[..., Any] = runtime.kernels(directory / "step.py").loss
    return site


def error(variant: Variant, sizes: Sizes, device: torch.device) -> float:
    """The largest error of loss, dx and dweight in the Frobenius norm, relative to float64."""
    inputs = draw(sizes.checked, sizes, device)
    loss, dx, dweight = variant(inputs)
    found = (loss.double(), dx.double(), (inputs.total if dweight is None else dweight).double())
    exact = Inputs(inputs.x.double(), inputs.weight.double(), inputs.labels, inputs.total)
    return error_of(found, by_autograd(eager, exact))


def seconds_of(run: Callable[[], Any], device: torch.device) -> float:
    """Median seconds of a call."""
    taken = []
    for _ in range(CALLS + 2):
        synchronize(device)
        begin = time.perf_counter()
        run()
        synchronize(device)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[2:])


def synchronize(device: torch.device) -> None:
    """Wait for the GPU, where there is one."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def extra_of(variant: Variant, inputs: Inputs, device: torch.device) -> int:
    """Bytes at the peak of a call beyond inputs and results."""
    if device.type != "cuda":
        return 0
    variant(inputs)  # what libraries keep is there
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    made = variant(inputs)
    results = sum(t.numel() * t.element_size() for t in made if t is not None)
    return torch.cuda.max_memory_allocated() - before - results


def variants_of(
    sizes: Sizes, budgets: list[str], with_peers: bool, device: torch.device
) -> tuple[dict[str, Variant], list[str]]:
    """Ours with each budget, and others; what there is to say of those that are missing."""
    kernel = loss_kernel(sizes, device) if device.type == "cuda" else None
    logits = Value("logits", TensorType(DType.BF16, (sizes.rows, sizes.vocabulary)))
    variants: dict[str, Variant] = {}
    for budget in budgets:
        rows = rows_within(Recipe(chunk_loss=budget).loss_budget, logits)
        variants[f"{OURS}{budget}"] = functools.partial(ours, kernel, rows)
    others, missing = peers() if with_peers else ({}, [])
    return {**variants, **others}, missing


def main() -> int:
    """Measure all variants; a row of results for each of ours."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--budgets", nargs="*", default=["256MiB", "512MiB", "900MiB"])
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    device = torch.device("cpu") if options.small else gpu()
    sizes = Sizes(256, 32, 512, 103) if options.small else Sizes()
    variants, missing = variants_of(sizes, options.budgets, not options.no_peers, device)
    print("\n".join(missing), flush=True)
    complaints: list[str] = []
    found: dict[str, dict[str, float]] = {}
    with torch.no_grad():
        rate = matmul_rate(device) if device.type == "cuda" else 1.0
        print(f"{card()}: a product of 8192^3 at {rate / 1e12:.0f} TFLOP/s", flush=True)
        for name, variant in variants.items():
            try:
                found[name] = measured(name, variant, sizes, device, rate)
            except Exception as error_:  # the others go on
                complaints.append(f"{name}: {type(error_).__name__}: {str(error_).splitlines()[:1]}")
    mine = {name: seen for name, seen in found.items() if name.startswith(OURS)}
    others = {name: seen for name, seen in found.items() if name not in mine}
    times = {name: seen.pop("seconds") for name, seen in others.items()}
    workload = f"{sizes.rows}x{sizes.width} by {sizes.vocabulary}, bf16"
    for name, seen in mine.items():
        seconds, budget = seen.pop("seconds"), name.removeprefix(OURS)
        limit = {"limit": "matmul", "matmul": rate}
        append(options.results, row("K6", workload, seconds, "seconds", times, others, variant=budget, **seen, **limit))
    print("\n".join(complaints) or "all variants are right", flush=True)
    return bool(complaints)


def measured(name: str, variant: Variant, sizes: Sizes, device: torch.device, rate: float) -> dict[str, float]:
    """Measure one variant; raises ValueError where ours is wrong."""
    off = error(variant, sizes, device)
    if name.startswith(OURS) and not off <= BOUND:  # others may leave out small gradients by design
        raise ValueError(f"error {off:.1e}, allowed {BOUND:.1e}")
    gc.collect()
    inputs = draw(sizes.rows, sizes, device)
    extra = extra_of(variant, inputs, device)
    seconds = seconds_of(lambda: variant(inputs), device)
    fraction = 6 * sizes.rows * sizes.width * sizes.vocabulary / seconds / rate
    print(
        f"{name:18} {seconds * 1e3:8.2f} ms  {fraction:5.2f} of matmul  extra {extra / 2**20:6.0f} MiB error {off:.1e}",
        flush=True,
    )
    return {"seconds": seconds, "extra_bytes": extra, "error": off, "fraction": fraction}


if __name__ == "__main__":
    sys.exit(main())
