"""Tensors that lie one after another in memory, read and written as one: products of several weights at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mgraph.ir.dims import Dim, as_dim
from mgraph.ir.graph import Node
from mgraph.ir.opdef import REQUIRED, define_op
from mgraph.ir.ops.control import accumulate
from mgraph.ir.ops.cost import per_element, traffic, value_bytes
from mgraph.ir.ops.glu import GLU_ATTRS, glu_grad
from mgraph.ir.ops.rope import ATTRS, rope
from mgraph.ir.types import TensorType

if TYPE_CHECKING:
    from torch import Tensor

LAYOUTS = ("halves", "swapped", "interleaved")
"""How a packed tensor holds gate and up: one half each, gate first or last, or in turns."""


def joined(*tensors: Tensor, gathered: bool = False) -> Tensor:
    """Tensors [n_i, ...] of state as one [sum n_i, ...]: a view, as states that are joined lie one after another. So do
    those that are `gathered`, but for gathers over one rank and copies of what was gathered: a copy, then."""
    import torch

    return torch.cat(tensors)


def _infer_joined(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    first = types[0]
    for type_ in types:
        if not type_.shape or type_.shape[1:] != first.shape[1:] or type_.dtype is not first.dtype:
            raise ValueError(f"{type_} and {first} cannot be joined: only their first extents may differ")
    rows = sum((type_.shape[0] for type_ in types[1:]), first.shape[0])
    return (replace(first, shape=(rows, *first.shape[1:])),)


def accumulate_joined(*tensors: Tensor, fresh: bool = False, late: bool = False) -> tuple[Tensor, ...]:
    """Totals [n_i, ...], and last the part [sum n_i, ...] that is added to them as if they were one: `accumulate`."""
    *totals, part = tensors
    parts = part.split([total.shape[0] for total in totals])
    return tuple(accumulate.body(total, each, fresh) for total, each in zip(totals, parts, strict=True))


def _infer_accumulate(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    *totals, part = types
    (whole,) = _infer_joined(totals, attrs)
    if whole.shape != part.shape:
        raise ValueError(f"{part} is added to totals which together are {whole}")
    return tuple(totals)


def glu_grad_joined(
    dy: Tensor,
    gate: Tensor,
    up: Tensor,
    *,
    act: str,
    alpha: float = 1.702,
    limit: float = 0.0,
    offset: float = 0.0,
    layout: str = "halves",
) -> Tensor:
    """Both gradients of `glu_grad` in one tensor. dy, gate, up [..., f] → [..., 2f].

    `layout`: `halves` (`dgate | dup`), `swapped` (`dup | dgate`), `interleaved` (dgate in even columns, dup in odd).
    """
    import torch

    dgate, dup = glu_grad(dy, gate, up, act=act, alpha=alpha, limit=limit, offset=offset)
    if layout == "interleaved":
        return torch.stack((dgate, dup), -1).flatten(-2)
    return torch.cat((dup, dgate) if layout == "swapped" else (dgate, dup), -1)


def _infer_glu_grad(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    dy, gate, up = types
    if not dy.shape or not dy.shape == gate.shape == up.shape:
        raise ValueError(f"glu_grad_joined: {dy}, {gate} and {up} differ in shape")
    if attrs.get("layout", "halves") not in LAYOUTS:
        raise ValueError(f"glu_grad_joined: layout {attrs['layout']!r} is none of {', '.join(LAYOUTS)}")
    return (replace(gate, shape=(*gate.shape[:-1], 2 * gate.shape[-1])),)


def rope_join(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, *, style: str = "half", inverse: bool = False
) -> Tensor:
    """The heads of all three beside each other, those of q and k turned as by `rope`, as one projection has them.

    q [b, h, s, d], k [b, g, s, d], v [b, j, s, d], tables as `rope` takes them → [b, s, (h + g + j) d].
    """
    import torch

    turned = [rope(x, cos, sin, style=style, inverse=inverse) for x in (q, k)]
    return torch.cat([x.transpose(1, 2).flatten(2) for x in (*turned, v)], -1)


def _infer_rope_join(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    q, k, v = types[:3]
    if any(len(t.shape) != 4 or (t.shape[0], *t.shape[2:]) != (q.shape[0], *q.shape[2:]) for t in (q, k, v)):
        raise ValueError(f"rope_join: {q}, {k} and {v} differ in more than heads")
    batch, heads, length, width = q.shape
    return (replace(q, shape=(batch, length, (heads + k.shape[1] + v.shape[1]) * width)),)


def rope_joined(
    x: Tensor, cos: Tensor, sin: Tensor, *, heads: int, width: int, style: str = "half", inverse: bool = False
) -> Tensor:
    """The first `heads` heads of `width` columns turn as by `rope`, all others are as they were.

    x [b, s, n width], as one projection to q, k and v gives it; tables as `rope` takes them for [b, h, s, width].
    """
    import torch

    turned, rest = x[..., : heads * width], x[..., heads * width :]
    split = turned.unflatten(-1, (heads, width)).transpose(1, 2)
    return torch.cat([rope(split, cos, sin, style=style, inverse=inverse).transpose(1, 2).flatten(2), rest], -1)


def _infer_rope_joined(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    x, heads, width = types[0], attrs["heads"], attrs["width"]
    columns = x.shape[-1]
    if len(x.shape) != 3 or not isinstance(columns, int) or columns < heads * width or columns % width:
        raise ValueError(f"rope_joined: {x} has no {heads} heads of {width} columns")
    return (x,)


def _turned_traffic(node: Node) -> Dim:
    """Bytes of the heads that turn, read and written where they lie, and of the tables."""
    x, *tables = node.operands
    heads, width = node.attrs["heads"], node.attrs["width"]
    assert isinstance(heads, int) and isinstance(width, int)
    turned = replace(x, type=replace(x.tensor, shape=(*x.tensor.shape[:-1], heads * width)))
    return as_dim(2 * value_bytes(turned) + sum(map(value_bytes, tables)))


define_op("joined", joined, attrs={"gathered": False}, infer=_infer_joined)
define_op("accumulate_joined", accumulate_joined, attrs={"fresh": False, "late": False}, infer=_infer_accumulate)
define_op(
    "glu_grad_joined",
    glu_grad_joined,
    attrs={**GLU_ATTRS, "layout": "halves"},
    infer=_infer_glu_grad,
    flops=per_element(6),
    bytes=traffic,
    compute_dtype="f32",
)
define_op(
    "rope_join",
    rope_join,
    attrs=ATTRS,
    infer=_infer_rope_join,
    flops=per_element(3),
    bytes=traffic,
    compute_dtype="f32",
)
define_op(
    "rope_joined",
    rope_joined,
    attrs={"heads": REQUIRED, "width": REQUIRED, **ATTRS},
    infer=_infer_rope_joined,
    flops=per_element(3),
    bytes=_turned_traffic,
    compute_dtype="f32",
)
