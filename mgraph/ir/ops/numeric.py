"""Rounding points of op bodies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def rounded(value: Any, like: Tensor) -> Tensor:
    """`value` in the dtype of `like`: where an op that computes in a wider dtype rounds its result."""
    result: Tensor = value.to(like.dtype)
    return result
