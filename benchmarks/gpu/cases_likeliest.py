"""Cases of the likeliest token of each row of logits: one request, and as many as a full engine has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.kernel_case import Case
from mgraph.codegen.triton import likeliest
from mgraph.codegen.triton.likeliest import Likeliest
from mgraph.runtime import v1 as rt

CLASSES = 128256


def inputs(rows: int, classes: int) -> Callable[[torch.device], tuple[Any, ...]]:
    """Logits, and no targets."""

    def make(device: torch.device) -> tuple[Tensor, ...]:
        return torch.randn(rows, classes, device=device), torch.full((rows,), -1, device=device)

    return make


def case(rows: int, classes: int = CLASSES) -> Case:
    """All logits are read once."""
    return Case(
        id=f"likeliest-{rows}",
        workload=f"the likeliest of {classes} tokens and its log-probability, {rows} rows f32",
        spec=likeliest.build(f"likeliest_{rows}", Likeliest(classes, "f32")),
        inputs=inputs(rows, classes),
        reference=rt.likeliest,
        peers={"eager": rt.likeliest, "compile": rt.likeliest},
        bytes=rows * classes * 4,
        bound=1e-6,
    )


CASES = [case(rows) for rows in (1, 128)]
