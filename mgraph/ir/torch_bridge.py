"""Between our types and torch's. Every function imports torch when called: the IR itself never needs it."""

from __future__ import annotations

import functools
from typing import Any

from mgraph.ir.types import DType

_TORCH_NAMES = {
    DType.F64: "float64",
    DType.F32: "float32",
    DType.BF16: "bfloat16",
    DType.F16: "float16",
    DType.F8E4M3: "float8_e4m3fn",
    DType.F8E5M2: "float8_e5m2",
    DType.F8E8M0: "float8_e8m0fnu",
    DType.F4E2M1: "float4_e2m1fn_x2",
    DType.C64: "complex64",
    DType.I64: "int64",
    DType.I32: "int32",
    DType.I16: "int16",
    DType.I8: "int8",
    DType.U8: "uint8",
    DType.BOOL: "bool",
}


def torch_dtype_name(dtype: DType) -> str:
    """The attribute of `torch` that names a dtype, e.g. `bfloat16`."""
    return _TORCH_NAMES[dtype]


def to_torch_dtype(dtype: DType) -> Any:
    """The torch dtype."""
    import torch

    return getattr(torch, _TORCH_NAMES[dtype])


@functools.cache
def from_torch_dtype(dtype: Any) -> DType:
    """Our dtype of a torch dtype; KeyError for one we do not have."""
    return {name: ours for ours, name in _TORCH_NAMES.items()}[str(dtype).removeprefix("torch.")]


def promote(tensor: Any) -> Any:
    """At least f32: f64 stays f64. Op bodies compute in this, so that the lifted (float64) graph stays lifted."""
    import torch

    return tensor if tensor.dtype == torch.float64 else tensor.float()
