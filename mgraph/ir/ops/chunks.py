"""Rows in equal parts, and parts as rows: what works on some tokens after the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import sympy

from mgraph.ir.dims import as_dim
from mgraph.ir.opdef import REQUIRED, GradientRequest, define_op
from mgraph.ir.ops.cost import traffic
from mgraph.ir.types import TensorType

if TYPE_CHECKING:
    from torch import Tensor

    from mgraph.ir.graph import Value


def _split_rows(x: Tensor, *, parts: int) -> tuple[Tensor, ...]:
    """The equal parts of x [T, …] along its first dim, one after the other: as many tensors [T / parts, …].

    T is a multiple of `parts`: by its number, or by a fact of the module (`S % 2 == 0`).
    """
    return tuple(x.unflatten(0, (parts, -1)).unbind(0))


def _infer_split(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    rows, *rest = types[0].shape
    if isinstance(rows, int) and rows % attrs["parts"]:
        raise ValueError(f"split_rows: {attrs['parts']} does not divide the rows of {types[0]}")
    part = as_dim(sympy.sympify(rows) / attrs["parts"])
    return (TensorType(types[0].dtype, (part, *rest)),) * int(attrs["parts"])


def _split_gradient(request: GradientRequest) -> Sequence[Value | None]:
    builder, some = request.builder, next(c for c in request.cotangents if c is not None)
    none = None
    if None in request.cotangents:
        none = builder.one("aten.zeros_like.default", some)
    parts = [c or none for c in request.cotangents]
    return builder.emit("join_rows", [part for part in parts if part is not None], names=("drows",))


def _join_rows(*parts: Tensor) -> Tensor:
    """Tensors [R, …] of equal shapes one after the other: [n·R, …]."""
    import torch

    return torch.cat(parts)


def _infer_join(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    if any(t.shape != types[0].shape or t.dtype != types[0].dtype for t in types):
        raise ValueError(f"join_rows: {', '.join(map(str, types))} are not alike")
    rows, *rest = types[0].shape
    return (TensorType(types[0].dtype, (as_dim(len(types) * rows), *rest)),)


def _join_gradient(request: GradientRequest) -> Sequence[Value | None]:
    count = len(request.node.operands)
    return request.builder.emit("split_rows", (request.cotangent,), {"parts": count}, names=("drows",) * count)


define_op("split_rows", _split_rows, infer=_infer_split, attrs={"parts": REQUIRED}, gradient=_split_gradient)
define_op("join_rows", _join_rows, infer=_infer_join, gradient=_join_gradient, bytes=traffic)
