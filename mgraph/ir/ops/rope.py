"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), its inverse and the gradient of its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mgraph.ir.dims import divide
from mgraph.ir.opdef import GradientRequest, define_op
from mgraph.ir.ops.cost import per_element, traffic
from mgraph.ir.ops.numeric import rounded
from mgraph.ir.torch_bridge import promote
from mgraph.ir.types import TensorType

if TYPE_CHECKING:
    from torch import Tensor

    from mgraph.ir.graph import Value

ATTRS = {"style": "half", "inverse": False}
"""Which elements turn together: with `style="half"` element i of the first half and element i of the second, with
`interleaved` elements 2i and 2i + 1."""


def _joined(first: Tensor, second: Tensor, style: str) -> Tensor:
    """The tensor whose pairs have these first and second elements."""
    import torch

    assert style in ("half", "interleaved"), f"unknown rope style {style!r}"
    return torch.cat((first, second), -1) if style == "half" else torch.stack((first, second), -1).flatten(-2)


def _parted(x: Tensor, style: str) -> tuple[Tensor, Tensor]:
    """The first and the second elements of the pairs."""
    first, second = x.chunk(2, -1) if style == "half" else (x[..., 0::2], x[..., 1::2])
    return first, second


def _tables(cos: Tensor, sin: Tensor, width: int, style: str) -> tuple[Tensor, Tensor]:
    """Both tables at the width of x, in at least f32; one of half the width serves both elements of a pair."""
    cos, sin = promote(cos), promote(sin)
    if cos.shape[-1] * 2 == width:
        cos, sin = _joined(cos, cos, style), _joined(sin, sin, style)
    return cos, sin


def _quarter_turn(x: Tensor, style: str) -> Tensor:
    """`(a, b) → (-b, a)` for the pairs of the last dim."""
    first, second = _parted(x, style)
    return _joined(-second, first, style)


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, style: str = "half", inverse: bool = False) -> Tensor:
    """Rotate pairs of the last dim: with R(a, b) = (-b, a) on each pair, `y = x · cos + R(x) · sin`.

    x [..., d]; cos and sin [..., d] or [..., d/2] (a number for each pair), broadcast against x. Computed in at least
    f32 and rounded once to x's dtype. `inverse=True` is the transposed map `x · cos - R(x · sin)`, which for a rotation
    is its inverse, and is the gradient of x in any case.
    """
    cos, sin = _tables(cos, sin, x.shape[-1], style)
    wide = promote(x)
    turned = -_quarter_turn(wide * sin, style) if inverse else _quarter_turn(wide, style) * sin
    return rounded(wide * cos + turned, x)


def rope_table_grad(dy: Tensor, x: Tensor, cos: Tensor, sin: Tensor, *, style: str = "half") -> tuple[Tensor, Tensor]:
    """Gradient of `rope` for its tables: `dcos = Σ dy · x`, `dsin = Σ dy · R(x)`, summed where they were broadcast."""
    import torch

    grad, wide = promote(dy), promote(x)
    products = grad * wide, grad * _quarter_turn(wide, style)
    dcos, dsin = (torch.add(*_parted(p, style)) if cos.shape[-1] * 2 == x.shape[-1] else p for p in products)
    return rounded(dcos.sum_to_size(cos.shape), cos), rounded(dsin.sum_to_size(sin.shape), sin)


def _infer(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    x, cos, sin = types
    if cos.shape != sin.shape:
        raise ValueError(f"rope: cos is {cos} but sin is {sin}")
    if not x.shape or cos.shape[-1] not in (x.shape[-1], divide(x.shape[-1], 2)):
        raise ValueError(f"rope: the last dim of cos in {cos} is neither that of x in {x} nor half of it")
    return (TensorType(x.dtype, x.shape),)


def _gradient(request: GradientRequest) -> Sequence[Value | None]:
    builder, attrs = request.builder, request.node.attrs
    x, cos, sin = request.node.operands
    turned = {**attrs, "inverse": not attrs.get("inverse", False)}
    dx = builder.one("rope", request.cotangent, cos, sin, name="dx", **turned) if request.needs[0] else None
    if not any(request.needs[1:]):
        return dx, None, None
    assert not attrs.get("inverse", False), "the tables of an inverse rope get no gradient"
    operands = (request.cotangent, x, cos, sin)
    style = {"style": attrs.get("style", "half")}
    return dx, *builder.emit("rope_table_grad", operands, style, names=("dcos", "dsin"))


define_op(
    "rope",
    rope,
    infer=_infer,
    attrs=ATTRS,
    gradient=_gradient,
    flops=per_element(3),
    bytes=traffic,
    compute_dtype="f32",
)
define_op(
    "rope_table_grad",
    rope_table_grad,
    infer=lambda types, attrs: (types[2], types[3]),
    attrs={"style": "half"},
    flops=per_element(2),
    bytes=traffic,
    compute_dtype="f32",
)
