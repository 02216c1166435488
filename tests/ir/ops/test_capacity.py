"""Capacity of experts against sorting each expert's tokens, values and gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mgraph.ir.opdef import op_def
from mgraph.ir.types import DType, TensorType

CASES = [(1, 1, 2), (1, 2, 4), (9, 2, 4), (13, 3, 5), (64, 4, 8)]
"""Tokens, choices, experts."""
FACTORS = [0.25, 1.0, 1.5, 100.0]


def routing(tokens: int, choices: int, experts: int, *, hot: bool = False) -> Tensor:
    """Distinct experts of each token; `hot`: expert 0 is one of all tokens'."""
    scores = torch.rand(tokens, experts)
    scores[:, 0] += 2 * hot
    return scores.topk(choices).indices


def reference(weights: Tensor, indices: Tensor, experts: int, factor: float, keep: str) -> tuple[Tensor, Tensor]:
    room = math.ceil(indices.numel() / experts * factor)
    mask, new = torch.zeros_like(weights), torch.full_like(indices, experts)
    for e in range(experts):
        mine = [(t, k) for t in range(len(indices)) for k in range(indices.shape[1]) if indices[t, k] == e]
        if keep == "weight":
            mine.sort(key=lambda pair: -float(weights[pair].detach()))
        for pair in mine[:room]:
            mask[pair], new[pair] = 1, e
    return weights * mask, new


@pytest.mark.parametrize(("tokens", "choices", "experts"), CASES)
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("keep", ["weight", "position"])
@pytest.mark.parametrize("hot", [False, True])
def test_capacity(check_op: Any, tokens: int, choices: int, experts: int, factor: float, keep: str, hot: bool) -> None:
    weights, indices = torch.rand(tokens, choices, requires_grad=True), routing(tokens, choices, experts, hot=hot)
    attrs = {"num_experts": experts, "factor": factor, "keep": keep}
    check_op("moe_capacity", (weights, indices), attrs, lambda w, i: reference(w, i, experts, factor, keep))


@pytest.mark.parametrize(("tokens", "choices", "experts"), CASES)
@pytest.mark.parametrize("kept", [0.0, 0.5, 1.0])
def test_padding(check_op: Any, tokens: int, choices: int, experts: int, kept: float) -> None:
    weights, indices = torch.rand(tokens, choices, requires_grad=True), routing(tokens, choices, experts)
    real = torch.rand(tokens) < kept
    rows = [
        (list(row), e.tolist()) if is_real else None for row, e, is_real in zip(weights, indices, real, strict=True)
    ]

    def dropped(w: Tensor, i: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        mask = torch.stack([torch.full((choices,), float(row is not None)) for row in rows])
        numbers = [[experts] * choices if row is None else row[1] for row in rows]
        return w * mask, torch.tensor(numbers)

    check_op("moe_drop_padding", (weights, indices, real), {"num_experts": experts}, dropped)


def test_padding_of_other_tokens_is_refused() -> None:
    infer = op_def("moe_drop_padding").infer
    assert infer is not None
    weights, indices = TensorType(DType.F32, (6, 2)), TensorType(DType.I64, (6, 2))
    for real in (TensorType(DType.BOOL, (5,)), TensorType(DType.BOOL, (6, 2)), TensorType(DType.I64, (6,))):
        with pytest.raises(ValueError, match=r"moe_drop_padding: .* do not fit"):
            infer((weights, indices, real), {"num_experts": 4})
