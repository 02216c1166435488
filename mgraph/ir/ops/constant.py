"""Small tensors written into the graph: the op `constant`, and `aten.full.default` where all elements are equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mgraph.ir.opdef import REQUIRED, define_op
from mgraph.ir.torch_bridge import to_torch_dtype
from mgraph.ir.types import DType, TensorType

WRITTEN = 256
"""Elements that a tensor may have to be written into the graph."""


def _constant(*, values: Sequence[float], shape: Sequence[int], dtype: DType) -> Any:
    """The given elements, row-major, in the given shape."""
    import torch

    return torch.tensor(list(values), dtype=to_torch_dtype(dtype)).reshape(tuple(shape))


def _infer_constant(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    type_ = TensorType(attrs["dtype"], tuple(attrs["shape"]))
    if type_.numel != len(attrs["values"]):
        raise ValueError(f"a constant of shape {list(attrs['shape'])} has {len(attrs['values'])} values")
    return (type_,)


def written(type_: TensorType, elements: Sequence[bool | int | float]) -> tuple[str, dict[str, Any]]:
    """Op and attributes of a node that makes a tensor of these elements (row-major, static shape)."""
    if elements and all(e == elements[0] for e in elements):
        return "aten.full.default", {"size": type_.shape, "fill_value": elements[0], "dtype": type_.dtype}
    return "constant", {"values": tuple(elements), "shape": type_.shape, "dtype": type_.dtype}


constant = define_op(
    "constant",
    _constant,
    attrs={"values": REQUIRED, "shape": REQUIRED, "dtype": REQUIRED},
    infer=_infer_constant,
)
