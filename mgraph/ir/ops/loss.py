"""Cross entropy over a vocabulary, summed over tokens, and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mgraph.ir.opdef import GradientRequest, Strategy, define_op, op_def
from mgraph.ir.ops.cost import per_element, traffic
from mgraph.ir.ops.numeric import rounded
from mgraph.ir.torch_bridge import promote
from mgraph.ir.types import Partial, Shard

if TYPE_CHECKING:
    from torch import Tensor

    from mgraph.ir.graph import Value

ATTRS = {"ignore_index": -100, "classes": 0}


def cross_entropy(
    logits: Tensor, labels: Tensor, *, ignore_index: int = -100, classes: int = 0
) -> tuple[Tensor, Tensor]:
    """`sum = Σ over rows with label ≠ ignore_index of (lse - logits[label])`, `lse = log Σ exp(logits)`.

    logits [n, v], labels i64[n] → sum f32[], lse f32[n]. Computed in at least f32. All rows ignored gives 0. Where
    `classes` is not 0, columns from it on are padding: they count for nothing, and their gradient is 0.
    """
    wide = promote(logits)[:, : classes or None]
    lse = wide.logsumexp(-1)
    counted = labels != ignore_index
    picked = wide.gather(1, labels.where(counted, 0)[:, None])[:, 0]
    return (lse - picked).where(counted, 0).sum(), lse


def cross_entropy_grad(
    dsum: Tensor, logits: Tensor, labels: Tensor, lse: Tensor, *, ignore_index: int = -100, classes: int = 0
) -> Tensor:
    """Gradient of `cross_entropy`: `dsum · (exp(logits - lse) - onehot(label))`, 0 in ignored rows.

    dsum f32[], logits [n, v], labels i64[n], lse f32[n] → dlogits [n, v] in logits' dtype.
    """
    import torch

    counted = labels != ignore_index
    probabilities = (promote(logits) - lse[:, None]).exp()
    if classes:
        probabilities = probabilities.where(torch.arange(logits.shape[1], device=logits.device) < classes, 0)
    columns = labels.where(counted, 0)[:, None]
    grad = probabilities.scatter_add(1, columns, -torch.ones_like(probabilities[:, :1]))
    return rounded(grad * dsum * counted[:, None], logits)


def cross_entropy_with_grad(
    logits: Tensor, labels: Tensor, dsum: Tensor, *, ignore_index: int = -100, classes: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """`cross_entropy` and `cross_entropy_grad` in one: what both give, from the cotangent of the sum known before.

    logits [n, v], labels i64[n], dsum f32[] → sum f32[], lse f32[n], dlogits [n, v] in logits' dtype.
    """
    total, lse = cross_entropy(logits, labels, ignore_index=ignore_index, classes=classes)
    grad = cross_entropy_grad(dsum, logits, labels, lse, ignore_index=ignore_index, classes=classes)
    return total, lse, grad


def _gradient(request: GradientRequest) -> Sequence[Value | None]:
    node = request.node
    assert request.cotangents[1] is None, "cross_entropy: lse is saved for the gradient only and gets no cotangent"
    operands = (request.cotangent, *node.operands, node.results[1])
    return (*request.builder.emit("cross_entropy_grad", operands, node.attrs, names=("dlogits",)), None)


define_op(
    "cross_entropy",
    cross_entropy,
    signature="n v^, n -> :f32, n:f32",
    attrs=ATTRS,
    gradient=_gradient,
    flops=per_element(4),
    bytes=traffic,
    compute_dtype="f32",
    strategies=(Strategy("rows", (Shard(0), Shard(0)), (Partial(), Shard(0))),),
)
define_op(
    "cross_entropy_grad",
    cross_entropy_grad,
    infer=lambda types, attrs: (types[1],),
    attrs=ATTRS,
    flops=lambda node: 4 * node.operands[1].tensor.numel,
    bytes=traffic,
    compute_dtype="f32",
    strategies=(Strategy("rows", (None, Shard(0), Shard(0), Shard(0)), (Shard(0),)),),
)
define_op(
    "cross_entropy_with_grad",
    cross_entropy_with_grad,
    infer=lambda types, attrs: (*op_def("cross_entropy").result_types(types[:2], attrs), types[0]),
    attrs=ATTRS,
    flops=lambda node: 8 * node.operands[0].tensor.numel,
    bytes=traffic,
    compute_dtype="f32",
    strategies=(Strategy("rows", (Shard(0), Shard(0), None), (Partial(), Shard(0), Shard(0))),),
)
