"""All declared ops; importing this package declares them."""

from __future__ import annotations

from mgraph.ir.ops import (
    attention,
    balance,
    cache,
    collective,
    constant,
    control,
    glu,
    loss,
    moe,
    norm,
    norm_rope,
    optimizer,
    pad,
    product,
    random,
    repeat,
    rope,
    route,
    shape,
    vocabulary,
)

__all__ = [
    "attention",
    "balance",
    "cache",
    "collective",
    "constant",
    "control",
    "glu",
    "loss",
    "moe",
    "norm",
    "norm_rope",
    "optimizer",
    "pad",
    "product",
    "random",
    "repeat",
    "rope",
    "route",
    "shape",
    "vocabulary",
]
