"""Arguments that torch takes by a rule are written out as torch takes them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from mgraph.capture.rules import implied
from mgraph.ir.graph import Value
from mgraph.ir.torch_bridge import to_torch_dtype
from mgraph.ir.types import DType, TensorType


@pytest.mark.parametrize("dtype", [DType.F64, DType.F32, DType.BF16, DType.F16])
def test_epsilon_of_rms_norm(dtype: DType) -> None:
    operand = Value("x", TensorType(dtype, (3, 8)))
    eps = implied("aten.rms_norm.default", [operand], {"normalized_shape": (8,)})["eps"]
    x = torch.full((3, 8), 2e-3, dtype=to_torch_dtype(dtype))  # small, so that the epsilon counts
    norm: Callable[..., torch.Tensor] = F.rms_norm
    assert torch.equal(norm(x, (8,)), norm(x, (8,), eps=eps))
    assert not torch.equal(norm(x, (8,)), norm(x, (8,), eps=100 * eps)) or dtype is DType.F64
    assert implied("aten.rms_norm.default", [operand], {"eps": 1e-5}) == {}
    assert implied("aten.layer_norm.default", [operand], {}) == {}
