"""What a case on tensors of more than 2**31 elements is, of which the far end alone holds anything."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from mgraph.codegen.triton import KernelSpec

END = 64
"""Rows that hold anything."""

Drawn = tuple[tuple[Any, ...], list[Tensor]]


@dataclass(frozen=True)
class Far:
    """A site; on a device its inputs, and what the last rows of its results are, by a reference; which inputs count as
    results behind those, as it writes into them; a bound of the error of each, relative; and the rows of a result."""

    spec: KernelSpec
    draw: Callable[[torch.device], Drawn]
    written: tuple[int, ...] = ()
    bound: float = 2e-2
    rows: Callable[[Tensor], Tensor] = lambda tensor: tensor


def far(
    *shape: int,
    device: torch.device,
    last: int = END,
    dtype: torch.dtype = torch.bfloat16,
    scale: float = 1.0,
    shift: int = 0,
) -> Tensor:
    """Zeros, but for the last rows; so many elements behind a 16-byte boundary."""
    count = math.prod(shape) + shift
    if device.type == "cpu":
        flat = torch.from_numpy(numpy.zeros(count * dtype.itemsize, numpy.uint8)).view(dtype)
    else:
        flat = torch.zeros(count, dtype=dtype, device=device)
    made = flat[shift:].view(shape)
    made[-last:].normal_().mul_(scale)
    return made


def results(case: Far, inputs: tuple[Any, ...], made: Any) -> list[Tensor]:
    """What is compared with what is wanted, of all rows."""
    found = [*(made if isinstance(made, tuple) else (made,)), *(inputs[place] for place in case.written)]
    return [case.rows(tensor[0] if isinstance(tensor, list) else tensor) for tensor in found]


def check(case: Far, found: list[Tensor], wanted: list[Tensor]) -> None:
    """The last rows of each result."""
    for tensor, want in zip(found, wanted, strict=True):
        want = want.double().cpu()
        assert want.any() and float((tensor[-len(want) :].double().cpu() - want).norm() / want.norm()) <= case.bound
