"""The op `constant`."""

from __future__ import annotations

import pytest
import torch

from mgraph.ir.opdef import op_def
from mgraph.ir.types import DType, TensorType


@pytest.mark.parametrize(
    ("values", "shape", "dtype", "expected"),
    [
        ((1.0, -0.5, 3.0, 0.1, 2.0, 7.0), (2, 3), DType.F32, torch.tensor([[1.0, -0.5, 3.0], [0.1, 2.0, 7.0]])),
        ((True, False), (2, 1), DType.BOOL, torch.tensor([[True], [False]])),
        ((2**53 + 1,), (), DType.I64, torch.tensor(2**53 + 1)),
        ((), (0, 4), DType.BF16, torch.empty(0, 4, dtype=torch.bfloat16)),
    ],
)
def test_values_and_type(
    values: tuple[float, ...], shape: tuple[int, ...], dtype: DType, expected: torch.Tensor
) -> None:
    declared = op_def("constant")
    attrs = {"values": values, "shape": shape, "dtype": dtype}
    made = declared.body(**attrs)
    assert made.dtype == expected.dtype and torch.equal(made, expected)
    assert declared.result_types([], attrs) == (TensorType(dtype, shape),)


def test_the_number_of_values_must_fit() -> None:
    with pytest.raises(ValueError, match="has 3 values"):
        op_def("constant").result_types([], {"values": (1, 2, 3), "shape": (2, 2), "dtype": DType.I64})
