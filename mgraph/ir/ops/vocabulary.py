"""What one rank does of an embedding and of a cross entropy whose vocabulary is split over a mesh axis.

Equal parts of the vocabulary, one a rank, in order: the part of rank `index` (i64[]) begins at `index` times the number
of its rows. In types the vocabulary is whole, and the dim `parts` (one a rank) is split where it appears.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mgraph.ir.opdef import REQUIRED, define_op
from mgraph.ir.ops.cost import traffic
from mgraph.ir.ops.numeric import rounded
from mgraph.ir.torch_bridge import promote
from mgraph.ir.types import DType, TensorType

if TYPE_CHECKING:
    from torch import Tensor

    Types = Sequence[TensorType]
    Attrs = Mapping[str, Any]


def _within(tokens: Tensor, index: Any, rows: int) -> tuple[Tensor, Tensor]:
    """The row of the part that each token has (0 for those of other parts), and whether it is of the part."""
    row = tokens - index * rows
    inside = (row >= 0) & (row < rows)
    return row.where(inside, 0), inside


def embedding_part(weight: Tensor, tokens: Tensor, index: Any) -> Tensor:
    """The rows of an embedding that are in this part, 0 for tokens of other parts: the sum over ranks is the embedding.

    weight [V, N], tokens int [...], index i64[] → [..., N].
    """
    row, inside = _within(tokens, index, weight.shape[0])
    return weight[row] * inside[..., None].to(weight.dtype)


def embedding_part_grad(dy: Tensor, tokens: Tensor, index: Any, *, shape: Sequence[int], padding_idx: int) -> Tensor:
    """Gradient of `embedding_part` for its rows: each sums dy [..., N] over its tokens, `padding_idx` left out.

    The result has `shape` [V, N], of which a rank makes its part.
    """
    row, inside = _within(tokens, index, shape[0])
    counted = inside & (tokens != padding_idx)
    parts = (dy * counted[..., None].to(dy.dtype)).reshape(-1, dy.shape[-1])
    return dy.new_zeros(tuple(shape)).index_add(0, row.reshape(-1), parts)


def cross_entropy_part(
    logits: Tensor, labels: Tensor, index: Any, *, parts: int, classes: int = 0
) -> tuple[Tensor, Tensor]:
    """Of the logits of one part: `log Σ exp`, and the label's logit, 0 where the label is of another part.

    logits [n, v], labels i64[n], index i64[] → f32[n, parts], of which a rank makes its column, twice. Where `classes`
    is not 0, entries of the whole vocabulary from it on are padding.
    """
    wide = promote(logits)
    row, inside = _within(labels, index, logits.shape[1])
    real = wide.where(_is_class(logits, index, classes), -float("inf"))
    return real.logsumexp(-1, keepdim=True), wide.gather(1, row[:, None]) * inside[:, None]


def _is_class(logits: Tensor, index: Any, classes: int) -> Tensor:
    """Which columns of a part are no padding; bool [v]."""
    import torch

    columns: Tensor = torch.arange(logits.shape[1], device=logits.device) + index * logits.shape[1]
    return columns < (classes or float("inf"))


def cross_entropy_join(
    lse: Tensor, picked: Tensor, labels: Tensor, *, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """`cross_entropy` from what its parts give: lse and picked f32[n, parts], labels i64[n] → sum f32[], lse f32[n]."""
    whole = lse.logsumexp(-1)
    return (whole - picked.sum(-1)).where(labels != ignore_index, 0).sum(), whole


def cross_entropy_part_grad(
    dsum: Tensor,
    logits: Tensor,
    labels: Tensor,
    lse: Tensor,
    index: Any,
    *,
    ignore_index: int = -100,
    classes: int = 0,
) -> Tensor:
    """Gradient of `cross_entropy` for the logits of one part [n, v], from the whole vocabulary's lse f32[n]."""
    row, inside = _within(labels, index, logits.shape[1])
    grad = (promote(logits) - lse[:, None]).exp().where(_is_class(logits, index, classes), 0)
    grad = grad.scatter_add(1, row[:, None], -inside[:, None].to(grad.dtype))
    return rounded(grad * dsum * (labels != ignore_index)[:, None], logits)


def _infer_part(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    return (TensorType(DType.F32, (types[0].shape[0], attrs["parts"])),) * 2


def _infer_join(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    return TensorType(DType.F32), TensorType(DType.F32, types[0].shape[:1])


define_op("embedding_part", embedding_part, infer=lambda t, _: (t[0].with_shape(*t[1].shape, t[0].shape[1]),))
define_op(
    "embedding_part_grad",
    embedding_part_grad,
    attrs={"shape": REQUIRED, "padding_idx": -1},
    infer=lambda types, attrs: (types[0].with_shape(*attrs["shape"]),),
    bytes=traffic,
)
define_op(
    "cross_entropy_part",
    cross_entropy_part,
    attrs={"parts": REQUIRED, "classes": 0},
    infer=_infer_part,
    compute_dtype="f32",
)
define_op(
    "cross_entropy_join",
    cross_entropy_join,
    attrs={"ignore_index": -100},
    infer=_infer_join,
    compute_dtype="f32",
)
define_op(
    "cross_entropy_part_grad",
    cross_entropy_part_grad,
    attrs={"ignore_index": -100, "classes": 0},
    infer=lambda types, attrs: (types[1],),
    compute_dtype="f32",
)
