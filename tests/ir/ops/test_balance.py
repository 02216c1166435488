"""Counts of choices, and the biases that they move: the graph's ops and the runtime's, against numpy-like sums."""

from __future__ import annotations

import pytest
import torch

from mgraph.ir.opdef import op_def
from mgraph.ir.types import DType, TensorType
from mgraph.runtime.moe import expert_bias_update_, expert_counts


@pytest.mark.parametrize("tokens", [0, 1, 37])
def test_counts(tokens: int) -> None:
    indices = torch.stack([torch.randperm(5)[:2] for _ in range(tokens)]) if tokens else torch.zeros(0, 2).long()
    expected = torch.tensor([int((indices == e).sum()) for e in range(5)])
    for counts in (op_def("expert_counts").body(indices, num_experts=5), expert_counts(indices, num_experts=5)):
        assert counts.dtype is torch.int64 and torch.equal(counts, expected)


@pytest.mark.parametrize("finite", [True, False])
def test_update(finite: bool) -> None:
    """Loads of 5, 3 and 1 move the biases by -rate, 0 and rate; equal loads move nothing."""
    biases = [torch.tensor([0.5, -0.25, 0.0]), torch.zeros(3)]
    loads = [torch.tensor([5, 3, 1]), torch.tensor([4, 4, 4])]
    steps = [torch.tensor([-0.125, 0.0, 0.125]) * finite, torch.zeros(3)]
    expected = [b + s for b, s in zip(biases, steps, strict=True)]
    operands = (*biases, *loads, torch.tensor(finite))
    assert all(map(torch.equal, op_def("expert_bias_update").body(*operands, rate=0.125), expected))
    expert_bias_update_(biases, loads, torch.tensor(finite), rate=0.125)
    assert all(map(torch.equal, biases, expected))


def test_types() -> None:
    bias, load = TensorType(DType.F32, (3,)), TensorType(DType.I64, (3,))
    infer = op_def("expert_bias_update").result_types
    assert infer([bias, bias, load, load, TensorType(DType.BOOL)], {"rate": 0.1}) == (bias, bias)
    with pytest.raises(ValueError, match="do not fit"):
        infer([bias, TensorType(DType.I64, (4,)), TensorType(DType.BOOL)], {"rate": 0.1})
    assert op_def("expert_counts").result_types([TensorType(DType.I64, (7, 2))], {"num_experts": 3}) == (load,)
    with pytest.raises(ValueError, match="expected i64"):
        op_def("expert_counts").result_types([TensorType(DType.I32, (7, 2))], {"num_experts": 3})
