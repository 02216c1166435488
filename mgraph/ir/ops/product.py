"""Matrix products that add to what is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mgraph.ir.dims import Dim, as_dim
from mgraph.ir.graph import Node
from mgraph.ir.opdef import define_op
from mgraph.ir.ops.cost import traffic
from mgraph.ir.ops.numeric import rounded
from mgraph.ir.torch_bridge import promote
from mgraph.ir.types import TensorType

if TYPE_CHECKING:
    from torch import Tensor


def matmul_add(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """`total + left @ right` in at least f32, rounded once. total [..., n], left [..., k], right [k, n] → [..., n]."""
    return rounded(promote(total) + promote(left) @ promote(right), total)


def _infer(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    total, left, right = types
    if len(right.shape) != 2 or left.shape[-1] != right.shape[0]:
        raise ValueError(f"matmul_add multiplies [..., k] and [k, n], not {left} and {right}")
    if total.shape != (*left.shape[:-1], right.shape[1]):
        raise ValueError(f"matmul_add adds the product of {left} and {right} to {total}")
    return (total,)


def _flops(node: Node) -> Dim:
    total, left, _ = node.operands
    return as_dim(total.tensor.numel * (2 * left.tensor.shape[-1] + 1))


define_op("matmul_add", matmul_add, infer=_infer, flops=_flops, bytes=traffic, compute_dtype="f32")
