"""Capacity of experts: how many tokens of a batch an expert takes; it drops the rest.

Shapes: T tokens, E experts, K experts a token. An expert has room for `C = ceil(T·K / E · factor)` tokens. What it
drops has the weight 0 and, instead of its number, E: dispatch puts such rows behind those of all experts, where no
product reaches them. Weights are not divided by their sum again. Padding is dropped likewise, by all experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from mgraph.ir.opdef import REQUIRED, GradientRequest, define_op
from mgraph.ir.ops.cost import per_element, traffic
from mgraph.ir.types import DType, TensorType

if TYPE_CHECKING:
    from torch import Tensor

    from mgraph.ir.graph import Value

DROPS = ("weight", "position")
"""What an expert that is full keeps: the tokens of largest weight (of equal ones the first), or the first ones."""


def room(pairs: int, num_experts: int, factor: float) -> int:
    """The capacity of an expert for so many pairs of token and choice; `factor` is the decimal it is written as."""
    return math.ceil(Fraction(str(factor)) * pairs / num_experts)


def _moe_capacity(
    weights: Tensor, indices: Tensor, *, num_experts: int, factor: float, keep: str = "weight"
) -> tuple[Tensor, Tensor]:
    """Drop the tokens for which an expert has no room: its `ceil(T·K / E · factor)` of largest weight stay, or, with
    `keep` position, its first ones.

    weights [T, K], indices i64[T, K] → weights [T, K], 0 where dropped, and indices i64[T, K], there `num_experts`.
    """
    import torch

    assert keep in DROPS, f"unknown choice {keep!r} of what is kept"
    capacity = room(indices.numel(), num_experts, factor)
    kept = torch.zeros_like(indices, dtype=torch.bool)
    flat, marks = weights.flatten(), kept.view(-1)
    for expert in range(num_experts):
        pairs = (indices.flatten() == expert).nonzero().flatten()
        if keep == "weight":
            pairs = pairs[flat[pairs].sort(descending=True, stable=True).indices]
        marks[pairs[:capacity]] = True
    return weights.where(kept, weights.new_zeros(())), indices.where(kept, num_experts)


def _moe_capacity_grad(dweights: Tensor, indices: Tensor, *, num_experts: int) -> Tensor:
    """Gradient of `moe_capacity`, or `moe_drop_padding`, for the weights [T, K]: none where a pair was dropped;
    `indices` are the new ones."""
    return dweights.where(indices < num_experts, dweights.new_zeros(()))


def _moe_drop_padding(weights: Tensor, indices: Tensor, real: Tensor, *, num_experts: int) -> tuple[Tensor, Tensor]:
    """Drop the tokens that are not `real`, padding: no expert gets them.

    weights [T, K], indices i64[T, K], real bool[T] → weights [T, K], 0 where dropped, and indices i64[T, K], there
    `num_experts`.
    """
    padding = ~real[:, None]
    return weights.masked_fill(padding, 0.0), indices.masked_fill(padding, num_experts)


def _infer_padding(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    weights, indices, real = types
    fitting = weights.shape == indices.shape and len(indices.shape) == 2 and indices.dtype is DType.I64
    if not fitting or real.dtype is not DType.BOOL or real.shape != indices.shape[:1]:
        raise ValueError(f"moe_drop_padding: weights {weights}, indices {indices} and real {real} do not fit")
    return weights, indices


def _padding_gradient(request: GradientRequest) -> Sequence[Value | None]:
    attrs = {"num_experts": request.node.attrs["num_experts"]}
    operands = (request.cotangent, request.node.results[1])
    return (*request.builder.emit("moe_capacity_grad", operands, attrs, names=("dweights",)), None, None)


def _infer(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    weights, indices = types
    if weights.shape != indices.shape or len(indices.shape) != 2 or indices.dtype is not DType.I64:
        raise ValueError(f"moe_capacity: weights {weights} and indices {indices} do not fit")
    if attrs["keep"] not in DROPS:
        raise ValueError(f"moe_capacity: keep is {attrs['keep']!r}, expected one of {', '.join(DROPS)}")
    return weights, indices


def _gradient(request: GradientRequest) -> Sequence[Value | None]:
    attrs = {"num_experts": request.node.attrs["num_experts"]}
    operands = (request.cotangent, request.node.results[1])
    return (*request.builder.emit("moe_capacity_grad", operands, attrs, names=("dweights",)), None)


define_op(
    "moe_capacity",
    _moe_capacity,
    infer=_infer,
    attrs={"num_experts": REQUIRED, "factor": REQUIRED, "keep": "weight"},
    gradient=_gradient,
    flops=per_element(2),
    bytes=traffic,
)
define_op(
    "moe_drop_padding",
    _moe_drop_padding,
    infer=_infer_padding,
    attrs={"num_experts": REQUIRED},
    gradient=_padding_gradient,
    flops=per_element(1),
    bytes=traffic,
)
define_op(
    "moe_capacity_grad",
    _moe_capacity_grad,
    infer=lambda types, attrs: (types[0],),
    attrs={"num_experts": REQUIRED},
    flops=per_element(1),
    bytes=traffic,
)
