"""Routers against their formulas, written out with sorts and masks; gradients against autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mgraph.ir.types import DType


def reference(logits: Tensor, bias: Tensor | None, how: dict[str, Any], top_k: int) -> tuple[Tensor, Tensor]:
    score = how.get("score", "softmax")
    scores = {"softmax": logits.softmax(-1), "sigmoid": logits.sigmoid(), "softmax_chosen": logits}[score]
    choice = scores.detach() if bias is None else scores.detach() + bias
    groups = how.get("groups", 1)
    if groups > 1:
        parts = choice.unflatten(1, (groups, -1))
        quality = parts.sort(-1, descending=True).values[..., : how["group_best"]].sum(-1)
        kept = quality.argsort(-1, descending=True)[:, : how["top_groups"]]
        for t in range(len(choice)):
            for group in set(range(groups)) - set(kept[t].tolist()):
                parts[t, group] = float("-inf")
        choice = parts.flatten(1)
    indices = choice.argsort(-1, descending=True)[:, :top_k]
    weights = scores.gather(1, indices)
    if score == "softmax_chosen":
        weights = weights.softmax(-1)
    if how.get("renormalize"):
        weights = weights / (weights.sum(-1, keepdim=True) + how.get("epsilon", 0.0))
    return weights * how.get("scale", 1.0), indices


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(5, 8, 2), (1, 4, 1), (7, 4, 4), (1, 2, 1)])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"renormalize": True},
        {"renormalize": True, "epsilon": 0.3, "scale": 1.5},
        {"score": "softmax_chosen"},
        {"score": "sigmoid"},
        {"score": "sigmoid", "renormalize": True, "epsilon": 1e-20, "scale": 2.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("biased", [False, True])
def test_route(check_op: Any, tokens: int, experts: int, top_k: int, how: dict[str, Any], biased: bool) -> None:
    operands = [torch.randn(tokens, experts, requires_grad=True)] + [torch.randn(experts)] * biased
    attrs = {"top_k": top_k, "dtype": DType.F32, **how}
    check_op("moe_route", operands, attrs, lambda x, bias=None: reference(x, bias, how, top_k))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("group_best", [1, 2])
def test_groups(check_op: Any, score: str, group_best: int) -> None:
    how = {"score": score, "groups": 4, "top_groups": 2, "group_best": group_best, "renormalize": True}
    operands = (torch.randn(9, 12, requires_grad=True), torch.randn(12))
    check_op("moe_route", operands, {"top_k": 5, **how}, lambda x, bias: reference(x, bias, how, 5))


def test_dtype_of_weights(run_op: Any) -> None:
    logits = torch.randn(6, 4).bfloat16().requires_grad_()
    for dtype, expected in ((DType.F32, torch.float32), (DType.BF16, torch.bfloat16)):
        cotangent = torch.ones(6, 2, dtype=expected)
        (weights, indices), (dlogits,) = run_op("moe_route", (logits,), {"top_k": 2, "dtype": dtype}, cotangent)
        plain = logits.float().softmax(-1).topk(2, -1)
        assert torch.equal(weights, plain.values.to(expected))
        assert torch.equal(indices, plain.indices)
        assert dlogits.dtype == torch.bfloat16
