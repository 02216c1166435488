"""A dim that is longer by zeros, so that an axis of more ranks than divide it has equal parts of it.

The dim is seen as the product of `parts` and what is left, parts major, and each part becomes as long as `to` says:
`parts = (50257,), to = (50260,)` appends three rows to a vocabulary of 50257; `parts = (2, 7), to = (2, 8)` appends a
head to each of two groups of seven. Over a mesh axis a rank makes its own part of it (`padded_part`) and never holds
the others. Backward, what belongs to the zeros is cut off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mgraph.ir.dims import as_dim, divide
from mgraph.ir.opdef import REQUIRED, GradientRequest, define_op
from mgraph.ir.ops.cost import traffic
from mgraph.ir.types import TensorType

if TYPE_CHECKING:
    from torch import Tensor

    from mgraph.ir.graph import Value

    Types = Sequence[TensorType]
    Attrs = Mapping[str, Any]


def pad_extent(x: Tensor, *, dim: int, parts: Sequence[int], to: Sequence[int]) -> Tensor:
    """x with zeros at the end of each of its `parts` along `dim`: [.., prod(parts) * n] → [.., prod(to) * n]."""
    from torch.nn import functional as F

    whole: Tensor = x.unflatten(dim, (*parts, -1))
    # Pairs from the last dim on: nothing behind the parts, nothing in front of each.
    missing = [n for have, want in reversed(list(zip(parts, to, strict=True))) for n in (0, want - have)]
    behind = [0, 0] * (x.ndim - dim)
    return F.pad(whole, [*behind, *missing]).flatten(dim, dim + len(parts))


def pad_extent_grad(dy: Tensor, *, dim: int, parts: Sequence[int], to: Sequence[int]) -> Tensor:
    """Gradient of `pad_extent`: dy without what belongs to the zeros."""
    grad: Tensor = dy.unflatten(dim, (*to, -1))
    for place, have in enumerate(parts):
        grad = grad.narrow(dim + place, 0, have)
    return grad.flatten(dim, dim + len(parts))


def padded_part(x: Tensor, index: Any, *, dim: int, parts: Sequence[int], to: Sequence[int], ranks: int) -> Tensor:
    """What rank `index` (i64[]) of `ranks` holds of `pad_extent(x)` split along `dim`: `R` to `S(dim)`. Nothing is
    sent."""
    return pad_extent(x, dim=dim, parts=parts, to=to).chunk(ranks, dim)[int(index)]


def _gradient(request: GradientRequest) -> tuple[Value | None, ...]:
    return request.builder.emit("pad_extent_grad", (request.cotangent,), request.node.attrs)


def _resized(types: Types, attrs: Attrs, before: str, after: str) -> tuple[TensorType, ...]:
    shape, dim = list(types[0].shape), attrs["dim"]
    if len(attrs["parts"]) != len(attrs["to"]) or any(n > m for n, m in zip(attrs["parts"], attrs["to"], strict=True)):
        raise ValueError(f"parts {attrs['parts']} do not become {attrs['to']} by padding")
    each = divide(shape[dim], math.prod(attrs[before]))
    if each is None:
        raise ValueError(f"dim {dim} of {types[0]} is not made of {attrs[before]}")
    shape[dim] = as_dim(each * math.prod(attrs[after]))
    return (types[0].with_shape(*shape),)


def _padded(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    return _resized(types, attrs, "parts", "to")


def _cut(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    return _resized(types, attrs, "to", "parts")


_PARTS = {"dim": REQUIRED, "parts": REQUIRED, "to": REQUIRED}
define_op("pad_extent", pad_extent, attrs=_PARTS, infer=_padded, gradient=_gradient, bytes=traffic)
define_op("pad_extent_grad", pad_extent_grad, attrs=_PARTS, infer=_cut, bytes=traffic)
define_op("padded_part", padded_part, attrs={**_PARTS, "ranks": REQUIRED}, infer=_padded, bytes=traffic)
