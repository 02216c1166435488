"""Capacity of experts against sorting each expert's tokens, values and gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

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
