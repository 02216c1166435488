"""Cases of cross entropy (K5): the loss with its gradient over the logits, and each of them alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.kernel_case import Case
from mgraph.codegen.triton import cross_entropy
from mgraph.codegen.triton.cross_entropy import CrossEntropy, Tuning

IGNORED = 16
"""Of so many labels one is to be ignored."""


def draw(rows: int, problem: CrossEntropy, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Logits in bf16, labels, and the cotangent of the sum."""
    logits = torch.randn(rows, problem.size, device=device, dtype=torch.bfloat16).mul_(2)
    labels = torch.randint(problem.real, (rows,), device=device)
    labels[::IGNORED] = problem.ignore_index
    return logits, labels, torch.ones((), device=device)


def loss_of(problem: CrossEntropy) -> Callable[..., tuple[Tensor, ...]]:
    """The sum and lse, in f32 at least."""

    def loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        lse = wide[:, : problem.real].logsumexp(-1)
        counted = labels != problem.ignore_index
        picked = wide.gather(1, labels.where(counted, 0)[:, None])[:, 0]
        return (lse - picked).where(counted, 0).sum(), lse

    return loss


def gradient_of(problem: CrossEntropy) -> Callable[..., tuple[Tensor, ...]]:
    """The gradient of the logits, in f32 at least, rounded to their dtype."""

    def gradient(dsum: Tensor, logits: Tensor, labels: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        column = torch.arange(problem.size, device=logits.device)
        likely = (wide - lse[:, None]).exp()
        if problem.classes:
            likely = likely.where(column < problem.classes, 0)
        scale = dsum.to(wide.dtype) * (labels != problem.ignore_index)
        return (((likely - (column == labels[:, None]).to(wide.dtype)) * scale[:, None]).to(logits.dtype),)

    return gradient


def both_of(problem: CrossEntropy) -> Callable[..., tuple[Tensor, ...]]:
    """The sum, lse and the gradient."""

    def both(logits: Tensor, labels: Tensor, dsum: Tensor) -> tuple[Tensor, ...]:
        total, lse = loss_of(problem)(logits, labels)
        return total, lse, *gradient_of(problem)(dsum, logits, labels, lse)

    return both


def liger(logits: Tensor, labels: Tensor, dsum: Tensor) -> Any:
    """Liger's kernel, which writes the gradient over the logits too."""
    from liger_kernel.ops import cross_entropy as liger_kernels  # type: ignore[import-not-found]

    leaf = logits.detach().requires_grad_()
    return liger_kernels.cross_entropy_forward(leaf, labels, None, -100, 0.0, 0.0, "sum", None, False)


def both_case(name: str, rows: int, problem: CrossEntropy, cut: Tuning | None = None) -> Case:
    """The loss with its gradient: each logit is read once and written once."""
    plain = both_of(problem)
    return Case(
        id=f"K5-{name}",
        workload=f"loss and gradient, {_workload(rows, problem)}",
        spec=cross_entropy.forward_backward(f"loss_{name.replace('-', '_')}", problem, cut),
        inputs=lambda device: draw(rows, problem, device),
        reference=plain,
        peers={"compile": plain, **({} if problem.classes else {"liger": liger})},
        launched=("liger",),
        bytes=2 * 2 * rows * problem.size,
        bound=3e-3,
    )


def loss_case(name: str, rows: int, problem: CrossEntropy) -> Case:
    """The loss alone, as in evaluation."""
    plain = loss_of(problem)
    return Case(
        id=f"K5-loss-{name}",
        workload=f"loss, {_workload(rows, problem)}",
        spec=cross_entropy.forward(f"loss_fwd_{name.replace('-', '_')}", problem),
        inputs=lambda device: draw(rows, problem, device)[:2],
        reference=plain,
        peers={"compile": plain},
        bytes=2 * rows * problem.size,
        bound=1e-6,
    )


def gradient_case(name: str, rows: int, problem: CrossEntropy) -> Case:
    """The gradient alone, where the cotangent is not known before the loss."""
    plain = gradient_of(problem)

    def inputs(device: torch.device) -> tuple[Tensor, ...]:
        logits, labels, dsum = draw(rows, problem, device)
        return dsum, logits, labels, loss_of(problem)(logits, labels)[1]

    return Case(
        id=f"K5-gradient-{name}",
        workload=f"gradient, {_workload(rows, problem)}",
        spec=cross_entropy.backward(f"loss_bwd_{name.replace('-', '_')}", problem),
        inputs=inputs,
        reference=plain,
        peers={"compile": plain},
        bytes=2 * 2 * rows * problem.size,
        bound=3e-3,
    )


def _workload(rows: int, problem: CrossEntropy) -> str:
    classes = f", {problem.classes} classes" if problem.classes else ""
    return f"{rows}x{problem.size} {problem.dtype}{classes}"


LARGE, MEDIUM = CrossEntropy(128256, "bf16"), CrossEntropy(32768, "bf16")
PADDED, LONGEST, ODD = (
    CrossEntropy(50304, "bf16", classes=50257),
    CrossEntropy(262144, "bf16"),
    CrossEntropy(50257, "bf16"),
)

CASES = [
    both_case("128k", 8192, LARGE),
    both_case("32k", 16384, MEDIUM),
    both_case("50k-padded", 8192, PADDED),
    both_case("262k", 4096, LONGEST),
    both_case("50k-odd", 1031, ODD),
    loss_case("128k", 8192, LARGE),
    loss_case("32k", 16384, MEDIUM),
    gradient_case("128k", 8192, LARGE),
    gradient_case("50k-padded", 8192, PADDED),
]

TUNINGS = [
    both_case(
        f"{name}-w{num_warps}-e{elements}-t{together}",
        rows,
        problem,
        Tuning(32 * num_warps * elements, num_warps, 1, together),
    )
    for name, rows, problem, num_warps, elements, together in (
        ("128k", 8192, LARGE, 32, 8, 8),
        ("128k", 8192, LARGE, 32, 8, 4),
        ("128k", 8192, LARGE, 32, 16, 4),
        ("128k", 8192, LARGE, 16, 8, 8),
        ("262k", 4096, LONGEST, 32, 8, 8),
        ("262k", 4096, LONGEST, 32, 16, 4),
        ("50k-padded", 8192, PADDED, 16, 8, 8),
        ("50k-padded", 8192, PADDED, 16, 16, 4),
        ("50k-padded", 8192, PADDED, 8, 8, 8),
        ("32k", 16384, MEDIUM, 16, 8, 8),
        ("32k", 16384, MEDIUM, 8, 8, 8),
    )
]
"""The first of the cases, cut in other ways: what the tuning function is to choose from."""
