"""A linear over the vocabulary with its loss and the gradients of both, of some rows at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mgraph.ir.dims import Dim, as_dim
from mgraph.ir.graph import Node
from mgraph.ir.opdef import REQUIRED, Strategy, define_op
from mgraph.ir.ops.cost import traffic
from mgraph.ir.ops.loss import ATTRS, cross_entropy_with_grad
from mgraph.ir.ops.numeric import rounded
from mgraph.ir.torch_bridge import promote
from mgraph.ir.types import DType, Partial, Shard, TensorType

if TYPE_CHECKING:
    from torch import Tensor


def linear_cross_entropy_with_grad(
    total: Tensor,
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    dsum: Tensor,
    *,
    rows: int,
    ignore_index: int = -100,
    classes: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """`cross_entropy_with_grad` of `logits = x @ weight.T`, with `dx = dlogits @ weight` and `total + dlogits.T @ x`.

    total [v, d], x [..., d], weight [v, d], labels i64[n] with n the product of x's leading dims, dsum f32[] → the new
    total, sum f32[], dx as x. The logits are rounded to x's dtype, as their gradient is; the sum to the total is in at
    least f32. `rows` says of how many rows there are logits at once, and nothing of what is computed.
    """
    flat = x.reshape(-1, x.shape[-1])
    logits = rounded(promote(flat) @ promote(weight).T, x)
    loss, _, dlogits = cross_entropy_with_grad(logits, labels, dsum, ignore_index=ignore_index, classes=classes)
    dx = rounded(promote(dlogits) @ promote(weight), x)
    dweight = promote(dlogits).T @ promote(flat)
    return rounded(promote(total) + dweight, total), loss, dx.reshape(x.shape)


def _infer(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    total, x, weight, labels, dsum = types
    if len(weight.shape) != 2 or x.shape[-1] != weight.shape[1] or total.shape != weight.shape:
        raise ValueError(f"a linear of {x} by {weight} with a gradient like {total}")
    if len(labels.shape) != 1 or as_dim(math.prod(x.shape[:-1])) != labels.shape[0]:
        raise ValueError(f"{labels} are not a label per row of {x}")
    if dsum.shape != () or attrs["rows"] < 1:
        raise ValueError(f"the cotangent is {dsum}, the rows at once {attrs['rows']}")
    wide = DType.F64 if x.dtype is DType.F64 else DType.F32
    return total, TensorType(wide), x


def _flops(node: Node) -> Dim:
    """Three products, and what the loss does with each logit."""
    _, x, weight, *_ = node.operands
    logits = x.tensor.numel // x.tensor.shape[-1] * weight.tensor.shape[0]
    return as_dim(logits * (6 * x.tensor.shape[-1] + 8))


def _workspace(node: Node, shapes: Sequence[Sequence[int]]) -> TensorType:
    """The logits of some rows, which become their gradient."""
    rows = node.attrs["rows"]
    assert isinstance(rows, int), node
    _, x, weight, *_ = shapes
    return TensorType(node.operands[1].tensor.dtype, (min(rows, math.prod(x[:-1])), weight[0]))


define_op(
    "linear_cross_entropy_with_grad",
    linear_cross_entropy_with_grad,
    infer=_infer,
    attrs={"rows": REQUIRED, **ATTRS},
    flops=_flops,
    bytes=traffic,
    workspace=_workspace,
    updates=1,
    compute_dtype="f32",
    strategies=(Strategy("rows", (Partial(), Shard(0), None, Shard(0), None), (Partial(), Partial(), Shard(0))),),
)
