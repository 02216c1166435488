"""The op `constant`: a small tensor written into the graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mgraph.ir.opdef import REQUIRED, define_op
from mgraph.ir.torch_bridge import to_torch_dtype
from mgraph.ir.types import DType, TensorType


def _constant(*, values: Sequence[float], shape: Sequence[int], dtype: DType) -> Any:
    """The given elements, row-major, in the given shape."""
    import torch

    return torch.tensor(list(values), dtype=to_torch_dtype(dtype)).reshape(tuple(shape))


def _infer_constant(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    type_ = TensorType(attrs["dtype"], tuple(attrs["shape"]))
    if type_.numel != len(attrs["values"]):
        raise ValueError(f"a constant of shape {list(attrs['shape'])} has {len(attrs['values'])} values")
    return (type_,)


constant = define_op(
    "constant",
    _constant,
    attrs={"values": REQUIRED, "shape": REQUIRED, "dtype": REQUIRED},
    infer=_infer_constant,
)
