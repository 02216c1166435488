"""Cases of norms with a residual: K1 is the sum and its norm, K2 the gradient of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.kernel_case import Case
from mgraph.codegen.triton import RmsNorm, residual_norm
from mgraph.codegen.triton.rms_norm import Tuning

SIZES = (2048, 4096, 8192)
EPS = 1e-5


def draw(rows: int, size: int, count: int, device: torch.device) -> tuple[Tensor, ...]:
    """`count` random tensors [rows, size] in bf16, and a weight [size] around 1."""
    tensors = [torch.randn(rows, size, device=device).bfloat16() for _ in range(count)]
    return *tensors, (1 + 0.3 * torch.randn(size, device=device)).bfloat16()


def forward_inputs(rows: int, size: int) -> Callable[[torch.device], tuple[Tensor, ...]]:
    """x, residual, weight."""
    return lambda device: draw(rows, size, 2, device)


def backward_inputs(rows: int, size: int) -> Callable[[torch.device], tuple[Tensor, ...]]:
    """dy, dsum, total, weight, rstd."""

    def make(device: torch.device) -> tuple[Tensor, ...]:
        *tensors, weight = draw(rows, size, 3, device)
        rstd = torch.rsqrt(tensors[2].float().square().mean(-1, keepdim=True) + EPS)
        return *tensors, weight, rstd

    return make


def forward_reference(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Sum, norm and rstd; the norm is of the sum as bf16 holds it."""
    total = x + residual
    rounded = total.bfloat16().to(x.dtype)
    rstd = torch.rsqrt(rounded.square().mean(-1, keepdim=True) + EPS)
    return total, rounded * rstd * weight, rstd


def backward_reference(dy: Tensor, dsum: Tensor, total: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, ...]:
    """dx and dweight."""
    normed, grad = total * rstd, dy * weight
    return dsum + (grad - normed * (grad * normed).mean(-1, keepdim=True)) * rstd, (dy * normed).sum(0)


def forward_eager(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """As models write it: the sum, the norm in f32, rounded before the weight."""
    total = x + residual
    wide = total.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    return total, weight * normed.to(x.dtype)


def forward_fused(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """The sum, and torch's own norm."""
    total = x + residual
    return total, functional.rms_norm(total, total.shape[-1:], weight, EPS)


def backward_eager(dy: Tensor, dsum: Tensor, total: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, ...]:
    """The formula in f32, rounded at the end; compiled it is what a compiler makes of it with all it may know."""
    dx, dweight = backward_reference(dy.float(), dsum.float(), total.float(), weight.float(), rstd)
    return dx.to(total.dtype), dweight.to(weight.dtype)


def forward_liger(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    """Liger's kernel."""
    from liger_kernel.ops import fused_add_rms_norm  # type: ignore[import-not-found]

    return fused_add_rms_norm.fused_add_rms_norm_forward(x, residual, weight, EPS, 0.0, "llama")


def backward_liger(dy: Tensor, dsum: Tensor, total: Tensor, weight: Tensor, rstd: Tensor) -> Any:
    """Liger's kernel; its casting mode 0 is that of Llama."""
    from liger_kernel.ops import fused_add_rms_norm, utils

    block, warps = utils.calculate_settings(total.shape[-1])
    return fused_add_rms_norm.fused_add_rms_norm_backward(
        dy, dsum, total, weight, rstd.flatten(), 0.0, 0, block, warps, 2, False
    )


def case(name: str, rows: int, size: int, cut: Tuning | None = None) -> Case:
    """A case in bf16; `name` is K1 or K2, `cut` a tuning other than the template's."""
    forward = name == "K1"
    mark = f"-r{cut.rows}w{cut.num_warps}s{cut.num_stages}p{cut.programs_per_sm}" if cut else ""
    problem = RmsNorm(size, "bf16", "bf16", EPS, round="normed")
    build = residual_norm.forward if forward else residual_norm.backward
    peers: dict[str, Callable[..., Any]] = {"eager": backward_eager, "compile": backward_eager, "liger": backward_liger}
    if forward:
        peers = {"eager": forward_eager, "compile": forward_eager, "fused": forward_fused, "liger": forward_liger}
    return Case(
        id=f"{name}-{rows}x{size}{mark}",
        workload=f"{'sum and its RMS norm' if forward else 'gradient of a sum and its RMS norm'}: {rows} x {size} bf16",
        spec=build(f"{name.lower()}_{rows}_{size}{mark.replace('-', '_')}", problem, cut),
        inputs=forward_inputs(rows, size) if forward else backward_inputs(rows, size),
        reference=forward_reference if forward else backward_reference,
        peers=peers,
        bytes=4 * rows * size * 2,
        bound=5e-3,
    )


CASES = [case("K1", 16384, size) for size in SIZES]
CASES += [case("K2", rows, size) for rows in (16384, 512) for size in SIZES]

FORWARD_GRID = [Tuning(rows, warps) for rows, warps in ((1, 4), (1, 8), (2, 8), (1, 16))]
BACKWARD_GRID = [
    Tuning(1, warps, stages, programs)
    for warps, stages, programs in (
        (4, 3, 4),
        (8, 2, 2),
        (8, 3, 1),
        (8, 3, 2),
        (8, 5, 1),
        (8, 5, 2),
        (16, 1, 1),
        (16, 3, 1),
        (16, 4, 1),
        (16, 5, 1),
        (32, 3, 1),
    )
]
MOST_BYTES = 220 * 1024
"""Of rows that a multiprocessor has on the way."""


def _has_room(size: int, cut: Tuning) -> bool:
    return (cut.num_stages - 1) * cut.programs_per_sm * 3 * 2 * size <= MOST_BYTES


TUNINGS = [case("K1", 16384, size, cut) for size in SIZES for cut in FORWARD_GRID]
TUNINGS += [
    case("K2", rows, size, cut)
    for rows in (16384, 512)
    for size in SIZES
    for cut in BACKWARD_GRID
    if _has_room(size, cut)
]
"""The same with other tunings, to choose the template's by."""
