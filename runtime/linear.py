"""Products of rows with weights: by a kernel made for a few rows where there are few, else by torch (cuBLAS).

Which it is follows from the shapes alone, so a CUDA graph of a bucket holds one or the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from mgraph.runtime import tensorrt_products
from mgraph.runtime.ops import glu

MOST_ROWS, MOST_UNIT_ROWS = 1, 16
"""Rows up to which the kernel for a few is the faster one on an H200: of a product, and of a gated unit of two."""

Site = Callable[..., Any]


def are_few(x: Tensor, most: int) -> bool:
    """Whether x [..., k] has rows, and at most so many."""
    return 0 < x.numel() // max(1, x.shape[-1]) <= most


def linear(
    x: Tensor,
    weight: Tensor,
    *more: Tensor,
    extra: tuple[str, ...] = (),
    few: Site | None = None,
    by: str = "",
) -> Tensor:
    """`x weight^T (+ bias) (+ residual)`: x [..., k], weight [n, k] → [..., n]; `extra` names what follows weight.

    `few` is the kernel site of the same operands that takes a few rows. `by="tensorrt"` takes an engine of TensorRT,
    where that is installed and fits.
    """
    if by == "tensorrt" and tensorrt_products.fits(x):
        return tensorrt_products.run(linear, (x, weight, *more), extra=extra)
    if few is not None and are_few(x, MOST_ROWS):
        made: Tensor = few(x, weight, *more)
        return made
    named = dict(zip(extra, more, strict=True))
    y = F.linear(x, weight, named.get("bias"))
    return y.add_(named["residual"]) if "residual" in named else y


def linear_glu(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    *,
    few: Site | None = None,
    unit: Site | None = None,
    by: str = "",
    **options: Any,
) -> Tensor:
    """`glu(x gate^T, x up^T)` with the `options` of `glu`: x [..., k], gate and up [f, k] → [..., f].

    `few` is the kernel site of the same operands that takes a few rows, `unit` that of the unit alone, for more;
    `by` as in `linear`.
    """
    if by == "tensorrt" and tensorrt_products.fits(x):
        return tensorrt_products.run(linear_glu, (x, gate, up), **options)
    if few is not None and are_few(x, MOST_UNIT_ROWS):
        made: Tensor = few(x, gate, up)
        return made
    parts = F.linear(x, gate), F.linear(x, up)
    return unit(*parts) if unit is not None else glu(*parts, **options)
