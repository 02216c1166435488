"""The runtime drops whom the op drops, at awkward sizes, with equal weights, on one hot expert."""

from __future__ import annotations

import pytest
import torch

from mgraph.runtime import v1 as rt
from tests.ir.ops.test_capacity import CASES, FACTORS, routing
from tests.runtime.test_ops import check


@pytest.mark.parametrize(("tokens", "choices", "experts"), CASES)
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_the_op_says(tokens: int, choices: int, experts: int, factor: float, dtype: torch.dtype) -> None:
    for hot in (False, True):
        indices = routing(tokens, choices, experts, hot=hot)
        weights = torch.randint(1, 4, indices.shape).to(dtype) / 4  # many equal ones
        for keep in ("weight", "position"):
            check("moe_capacity", weights, indices, num_experts=experts, factor=factor, keep=keep)
            _, kept = rt.moe_capacity(weights, indices, num_experts=experts, factor=factor, keep=keep)
            check("moe_capacity_grad", weights, kept, num_experts=experts)
            check("expert_counts", kept, num_experts=experts)
            assert torch.equal(
                rt.expert_counts(kept, num_experts=experts), kept.flatten().bincount(minlength=experts + 1)[:-1]
            )


@pytest.mark.parametrize(("tokens", "choices", "experts"), CASES)
def test_padding_as_the_op_says(tokens: int, choices: int, experts: int) -> None:
    for kept in (0.0, 0.5, 1.0):
        indices = routing(tokens, choices, experts)
        weights = torch.rand(indices.shape, dtype=torch.float64).to(torch.bfloat16)
        check("moe_drop_padding", weights, indices, torch.rand(tokens) < kept, num_experts=experts)
