"""Products of rows with weights as serving has them, with what follows: an added residual, or a gated unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mgraph.ir.dims import Dim, as_dim
from mgraph.ir.graph import Node
from mgraph.ir.opdef import define_op
from mgraph.ir.ops.cost import traffic
from mgraph.ir.ops.glu import GLU_ATTRS
from mgraph.ir.ops.glu import glu as _glu
from mgraph.ir.ops.numeric import rounded
from mgraph.ir.torch_bridge import promote
from mgraph.ir.types import TensorType

if TYPE_CHECKING:
    from torch import Tensor

LINEAR_EXTRA = ("bias", "residual")


def linear(x: Tensor, weight: Tensor, *more: Tensor, extra: Sequence[str] = ()) -> Tensor:
    """`y = x weightᵀ + bias + residual` in at least f32, rounded once. x [..., k], weight [n, k] → y [..., n].

    `extra` names the operands after weight, in this order: `bias` [n], `residual` [..., n].
    """
    y = promote(x) @ promote(weight).t()
    for part in more:
        y = y + promote(part)
    return rounded(y, x)


def linear_glu(
    x: Tensor, gate: Tensor, up: Tensor, *, act: str, alpha: float = 1.702, limit: float = 0.0, offset: float = 0.0
) -> Tensor:
    """`y = glu(x gateᵀ, x upᵀ)` in at least f32, rounded once; the unit as in `glu`. x [..., k], gate, up [f, k] →
    y [..., f]."""
    parts = (promote(x) @ promote(weight).t() for weight in (gate, up))
    return rounded(_glu(*parts, act=act, alpha=alpha, limit=limit, offset=offset), x)


def _product(what: str, x: TensorType, weight: TensorType) -> tuple[Dim, ...]:
    if len(weight.shape) != 2 or x.shape[-1:] != weight.shape[1:]:
        raise ValueError(f"{what} multiplies [..., k] and [n, k], not {x} and {weight}")
    return (*x.shape[:-1], weight.shape[0])


def _infer_linear(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    x, weight, *more = types
    shape = _product("linear", x, weight)
    wanted = {"bias": shape[-1:], "residual": shape}
    extra = tuple(attrs["extra"])
    if extra != tuple(name for name in LINEAR_EXTRA if name in extra) or len(extra) != len(more):
        raise ValueError(f"linear: extra {extra} does not name the {len(more)} operands after weight")
    for name, type_ in zip(extra, more, strict=True):
        if type_.shape != wanted[name]:
            raise ValueError(f"linear: {name} {type_} does not fit a result of shape {list(shape)}")
    return (TensorType(x.dtype, shape),)


def _infer_glu(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    x, gate, up = types
    shape = _product("linear_glu", x, gate)
    if up.shape != gate.shape:
        raise ValueError(f"linear_glu takes two weights of one shape, not {gate} and {up}")
    return (TensorType(x.dtype, shape),)


def _flops(node: Node) -> Dim:
    x, weights = node.operands[0].tensor, 2 if node.op == "linear_glu" else 1
    return as_dim(node.result.tensor.numel * (2 * x.shape[-1] * weights + 1))


define_op(
    "linear",
    linear,
    infer=_infer_linear,
    attrs={"extra": ()},
    flops=_flops,
    bytes=traffic,
    compute_dtype="f32",
)
define_op(
    "linear_glu",
    linear_glu,
    infer=_infer_glu,
    attrs=GLU_ATTRS,
    flops=_flops,
    bytes=traffic,
    compute_dtype="f32",
)
