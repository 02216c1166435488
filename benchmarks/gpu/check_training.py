"""Checks training packages on a GPU: RMS norms from pre-built binaries, losses and gradients as eager PyTorch's.

    python3 -m benchmarks.gpu.check_training RESULTS.json PACKAGE FAMILY:SIZE [PACKAGE FAMILY:SIZE ...]

The package trains; at every step the eager zoo model takes its weights and gives the loss and gradients of the same
batch (so that rounding does not grow with the steps). In f32 (no TF32) losses agree to 1e-5 and all gradients together
to 1e-4. In bf16 the package may be 1.5 times as far from eager f32 as eager bf16 is (root mean square over steps).
Triton must not have been imported by the package. Exit status 1 on any complaint.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mgraph import models
from mgraph.runtime.package import load_package
from mgraph.runtime.state import create_state

STEPS, BATCH, LENGTH = 30, 8, 256


def batches(vocab: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Random walks over the vocabulary, so that there is something to learn."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(STEPS):
        steps = torch.randint(0, 4, (BATCH, LENGTH + 1), generator=generator)
        rows = steps.cumsum(1) % vocab
        made.append((rows[:, :-1].contiguous().cuda(), rows[:, 1:].contiguous().cuda()))
    return made


def loss_of(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy, in f32."""
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), labels.flatten())


def eager_step(
    model: nn.Module, weights: dict[str, torch.Tensor], batch: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype
) -> tuple[float, torch.Tensor]:
    """Loss and all gradients (one vector, f32) of the eager model with these weights in a dtype."""
    for name, parameter in model.named_parameters():
        parameter.data, parameter.grad = weights[name].to(dtype), None
    loss = loss_of(model, *batch)
    loss.backward()
    gradients = [p.grad.flatten().float() for p in model.parameters() if p.grad is not None]
    return loss.item(), torch.cat(gradients)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """|found - expected| / |expected|."""
    return float((found - expected).norm() / expected.norm())


def check(path: Path, family: str, size: str, complaints: list[str]) -> dict[str, Any]:
    """One package against eager."""
    package = load_package(path, "cuda", strict=True)
    state = create_state(package.state_specs, 0, "cuda")
    providers = sys.modules[package.entries["microbatch"].__module__].K.providers
    model = models.get(family, size).cuda()
    names = [name for name, _ in model.named_parameters()]
    dtype = state[names[0]].dtype
    lr = torch.tensor(3e-4, device="cuda")
    losses, rows, seconds, eager_seconds = [], [], [], []
    for step, batch in enumerate(batches(package.vocab_size)):
        weights = {n: state[n].clone() for n in names}
        torch.cuda.synchronize()
        begun = time.perf_counter()
        with torch.no_grad():
            out = package.call("microbatch", state, *batch)
            loss = (out["loss_sum"] / out["count"]).item()
            gradients = torch.cat([(state[f"{n}.grad"] / out["count"]).flatten() for n in names])
            package.call("finish", state, lr)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
        if step == 0 and not complaints and "triton" in sys.modules and not _eager_ran:
            complaints.append(f"{path.name}: triton was imported")
        begun = time.perf_counter()
        eager_loss, eager_gradients = eager_step(model, weights, batch, dtype)
        torch.cuda.synchronize()
        eager_seconds.append(time.perf_counter() - begun)
        _eager_ran.append(path)
        exact_loss, exact = eager_step(model, weights, batch, torch.float32)
        losses.append(loss)
        rows.append(
            (
                abs(loss - exact_loss) / exact_loss,
                distance(gradients, exact),
                abs(eager_loss - exact_loss) / exact_loss,
                distance(eager_gradients, exact),
            )
        )
    rms = [math.sqrt(statistics.fmean(x * x for x in column)) for column in zip(*rows, strict=True)]
    allowed = (1e-5, 1e-4) if dtype == torch.float32 else (1.5 * rms[2] + 1e-5, 1.5 * rms[3] + 1e-4)
    for what, found, bound in zip(("losses", "gradients"), rms, allowed, strict=False):
        if not found <= bound:
            complaints.append(f"{path.name}: {what} differ by {found:.2e}, allowed {bound:.2e}")
    if set(providers.values()) != {"cubin"}:
        complaints.append(f"{path.name}: kernels come from {providers}")
    if not losses[-1] < 0.95 * losses[0]:
        complaints.append(f"{path.name}: the loss does not fall: {losses[0]:.3f} to {losses[-1]:.3f}")
    row = {
        "package": path.name,
        "dtype": str(dtype),
        "kernels": providers,
        "first loss": losses[0],
        "last loss": losses[-1],
        "loss difference": rms[0],
        "gradient difference": rms[1],
        "allowed": allowed,
        "seconds per step": statistics.median(seconds[5:]),
        "eager seconds, forward and backward only": statistics.median(eager_seconds[5:]),
        "peak bytes": torch.cuda.max_memory_allocated(),
    }
    print(" ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)
    return row


_eager_ran: list[Path] = []  # eager operators may import triton; a package must not


def main() -> int:
    """Check all packages of the command line."""
    out, *rest = sys.argv[1:]
    complaints: list[str] = []
    torch.backends.cuda.matmul.allow_tf32 = False
    rows = []
    for path, name in zip(rest[::2], rest[1::2], strict=True):
        family, size = name.split(":")
        rows.append(check(Path(path), family, size, complaints))
    device = torch.cuda.get_device_name()
    Path(out).write_text(
        json.dumps({"device": device, "torch": torch.__version__, "rows": rows, "complaints": complaints}, indent=1)
    )
    print("\n".join(complaints) or f"{device}: all packages agree, without triton")
    return bool(complaints)


if __name__ == "__main__":
    sys.exit(main())
