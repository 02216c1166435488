"""Ops on dtype and shape that everything else is written in: cast, reshape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mgraph.ir.dims import as_dim, product
from mgraph.ir.graph import Value
from mgraph.ir.opdef import REQUIRED, GradientRequest, define_op
from mgraph.ir.torch_bridge import to_torch_dtype
from mgraph.ir.types import DType, TensorType


def _cast(x: Any, *, dtype: DType) -> Any:
    """The same numbers in another dtype (rounds to nearest even)."""
    return x.to(to_torch_dtype(dtype))


def _infer_cast(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    return (types[0].with_dtype(attrs["dtype"]),)


def _cast_gradient(request: GradientRequest) -> list[Value | None]:
    return [request.builder.one("cast", request.cotangent, dtype=request.node.operands[0].tensor.dtype)]


cast = define_op("cast", _cast, attrs={"dtype": REQUIRED}, infer=_infer_cast, gradient=_cast_gradient)


def _reshape(x: Any, *, shape: Sequence[int]) -> Any:
    """The same elements in row-major order under another shape; strides do not matter (it copies where it must)."""
    return x.reshape(*shape) if shape else x.reshape(())


def _infer_reshape(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    shape = tuple(map(as_dim, attrs["shape"]))
    if product(shape) != types[0].numel:
        raise ValueError(f"reshape of {types[0]} to {list(shape)} changes the number of elements")
    return (types[0].with_shape(*shape),)


def _reshape_gradient(request: GradientRequest) -> list[Value | None]:
    return [request.builder.one("reshape", request.cotangent, shape=request.node.operands[0].tensor.shape)]


reshape = define_op("reshape", _reshape, attrs={"shape": REQUIRED}, infer=_infer_reshape, gradient=_reshape_gradient)
