"""Embedding and cross entropy over one part of a vocabulary that is split evenly over a mesh axis, in order.

`index` is this rank's place on the axis: its part begins at `index` times the rows (columns) that it has.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mgraph.runtime.ops import chunk_rows, row_lse


def _within(tokens: Tensor, index: int, rows: int) -> tuple[Tensor, Tensor]:
    """The row of the part that each token has (0 for those of other parts), and whether it is of the part."""
    row = tokens - index * rows
    inside = (row >= 0) & (row < rows)
    return row.where(inside, 0), inside


def embedding_part(weight: Tensor, tokens: Tensor, index: int) -> Tensor:
    """The rows of weight [V, N] for tokens of this part, zeros for others; [..., N]."""
    row, inside = _within(tokens, index, weight.shape[0])
    return F.embedding(row, weight).masked_fill_(~inside[..., None], 0)


def embedding_part_grad(
    grad: Tensor, tokens: Tensor, index: int, *, shape: tuple[int, int], padding_idx: int = -1
) -> Tensor:
    """Gradient of `embedding_part`, of `shape` [V, N]: each row sums grad [..., N] over its tokens."""
    return embedding_part_grad_(grad.new_zeros(shape), grad, tokens, index, padding_idx=padding_idx)


def embedding_part_grad_(total: Tensor, grad: Tensor, tokens: Tensor, index: int, *, padding_idx: int = -1) -> Tensor:
    """Add the gradient of `embedding_part` to total [V, N], in place; tokens `padding_idx` add nothing."""
    row, inside = _within(tokens, index, total.shape[0])
    counted = inside & (tokens != padding_idx)
    rows = grad.to(total.dtype).masked_fill(~counted[..., None], 0)
    return total.index_add_(0, row.reshape(-1), rows.reshape(-1, rows.shape[-1]))


def cross_entropy_part(
    logits: Tensor, labels: Tensor, index: int, *, parts: int, classes: int = 0
) -> tuple[Tensor, Tensor]:
    """log sum exp of this part's logits [N, V], and the label's logit where it is of this part, else 0; each [N, 1].

    `parts` is the number of ranks; entries of the whole vocabulary from `classes` on, if it is not 0, are padding. Rows
    are taken in pieces, so that no second [N, V] tensor is made.
    """
    lse = row_lse(logits[:, : _real(logits, index, classes)])
    row, inside = _within(labels, index, logits.shape[1])
    picked = logits.gather(1, row[:, None]).to(lse.dtype).masked_fill_(~inside[:, None], 0)
    return lse[:, None], picked


def cross_entropy_join(
    lse: Tensor, picked: Tensor, labels: Tensor, *, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """The loss sum and lse [N] of the whole vocabulary from all parts' columns, lse and picked [N, ranks]."""
    whole = lse.logsumexp(-1)
    return (whole - picked.sum(-1)).where(labels != ignore_index, 0).sum(), whole


def cross_entropy_part_grad(
    dsum: Tensor,
    logits: Tensor,
    labels: Tensor,
    lse: Tensor,
    index: int,
    *,
    ignore_index: int = -100,
    classes: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """`dsum * (exp(logits - lse) - onehot(label))` for this part's logits [N, V]; zero in ignored rows and padding.

    `out` may be `logits` itself, which is then overwritten.
    """
    out = torch.empty_like(logits) if out is None else out
    scale = (dsum * (labels != ignore_index))[:, None]
    row, inside = _within(labels, index, logits.shape[1])
    step = chunk_rows(logits)
    for start in range(0, logits.shape[0], step):
        rows = slice(start, start + step)
        piece = out[rows] if out.dtype == lse.dtype else torch.empty_like(out[rows], dtype=lse.dtype)
        torch.sub(logits[rows], lse[rows, None], out=piece).exp_()
        piece.scatter_add_(1, row[rows, None], -inside[rows, None].to(piece.dtype))
        torch.mul(piece, scale[rows], out=out[rows])
    out[:, _real(logits, index, classes) :] = 0
    return out


def _real(logits: Tensor, index: int, classes: int) -> int:
    """How many columns of a part are no padding."""
    columns = logits.shape[1]
    return min(max(classes - index * columns, 0), columns) if classes else columns


def by_token(
    tokens: Tensor, index: int = 0, *, rows: int | None = None, padding_idx: int = -1
) -> tuple[Tensor, Tensor]:
    """All tokens as rows of a part of `rows` rows, in ascending order (i32), and the place that each had (i64); equal
    ones keep their order. Tokens of other parts and `padding_idx` get the row after the last."""
    flat = tokens.reshape(-1)
    if rows is not None:
        row, inside = _within(flat, index, rows)
        flat = row.where(inside & (flat != padding_idx), rows)
    ids, order = flat.int().sort(stable=True)
    return ids, order
