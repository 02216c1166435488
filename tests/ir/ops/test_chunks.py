"""Rows in parts and joined again, with gradients, against torch's."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from torch import Tensor

from mgraph.ir.dims import symbol
from mgraph.ir.opdef import op_def
from mgraph.ir.types import DType, TensorType


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_split_and_join(check_op: Any, parts: int) -> None:
    x = torch.randn(6, 2, requires_grad=True)
    size = 6 // parts

    def split(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(x[i * size : (i + 1) * size] for i in range(parts))

    check_op("split_rows", (x,), {"parts": parts}, split if parts > 1 else lambda x: x.clone())
    pieces = tuple(torch.randn(size, 2, requires_grad=True) for _ in range(parts))
    check_op("join_rows", pieces, {}, lambda *p: torch.stack(p).reshape(6, 2))


def test_a_part_of_what_is_a_multiple_is_a_dim() -> None:
    batch, sequence = symbol("B"), symbol("S")
    whole = TensorType(DType.F32, (batch * sequence, 4))
    part = TensorType(DType.F32, (batch * sequence / sympy.Integer(2), 4))
    assert op_def("split_rows").result_types([whole], {"parts": 2}) == (part, part)
    assert op_def("join_rows").result_types([part, part], {}) == (whole,)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="2 does not divide the rows"):
        op_def("split_rows").result_types([TensorType(DType.F32, (3, 4))], {"parts": 2})
    with pytest.raises(ValueError, match="are not alike"):
        op_def("join_rows").result_types([TensorType(DType.F32, (n, 4)) for n in (2, 3)], {})
