"""Routing, dispatch, grouped products and combination against loops over tokens and experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mgraph.ir.types import DType


def _route(logits: Tensor, top_k: int, renormalize: bool, pre_softmax: bool) -> tuple[Tensor, Tensor]:
    scores = logits.softmax(-1) if pre_softmax else logits
    indices = scores.argsort(-1, descending=True)[:, :top_k]
    weights = scores.gather(1, indices)
    if not pre_softmax:
        weights = weights.softmax(-1)
    return weights / weights.sum(-1, keepdim=True) if renormalize else weights, indices


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(5, 8, 2), (1, 3, 1), (7, 4, 4), (1, 1, 1)])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("pre_softmax", [False, True])
def test_route(check_op: Any, tokens: int, experts: int, top_k: int, renormalize: bool, pre_softmax: bool) -> None:
    logits = torch.randn(tokens, experts, requires_grad=True)
    attrs = {"top_k": top_k, "renormalize": renormalize, "pre_softmax": pre_softmax, "dtype": DType.F32}
    check_op("moe_route", (logits,), attrs, lambda x: _route(x, top_k, renormalize, pre_softmax))


def test_route_dtype_of_weights(run_op: Any) -> None:
    logits = torch.randn(6, 4).bfloat16().requires_grad_()
    for dtype, expected in ((DType.F32, torch.float32), (DType.BF16, torch.bfloat16)):
        cotangent = torch.ones(6, 2, dtype=expected)
        (weights, indices), (dlogits,) = run_op("moe_route", (logits,), {"top_k": 2, "dtype": dtype}, cotangent)
        reference = logits.float().softmax(-1).topk(2, -1)
        assert torch.equal(weights, reference.values.to(expected))
        assert torch.equal(indices, reference.indices)
        assert dlogits.dtype == torch.bfloat16


INDICES = {
    "mixed": [[3, 0], [0, 2], [3, 2], [2, 0], [0, 3]],  # expert 1 is empty
    "one token": [[2, 1]],
    "one choice": [[1], [0], [1], [3]],
    "all to the last": [[3], [3], [3]],
    "all to the first": [[0], [0]],
}


@pytest.mark.parametrize("indices", INDICES.values(), ids=INDICES)
def test_dispatch(check_op: Any, indices: list[list[int]]) -> None:
    chosen = torch.tensor(indices)
    pairs = sorted((expert, t, k) for t, row in enumerate(indices) for k, expert in enumerate(row))
    ends = [sum(expert <= e for expert, _, _ in pairs) for e in range(4)]
    x = torch.randn(len(indices), 3, requires_grad=True)

    def reference(x: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        order = torch.tensor([t * len(indices[0]) + k for _, t, k in pairs])
        return torch.stack([x[t] for _, t, _ in pairs]), order, torch.tensor(ends, dtype=torch.int32)

    check_op("moe_dispatch", (x, chosen), {"num_experts": 4}, reference)


@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize("ends", [[2, 2, 5], [0, 0, 1], [4, 4, 4], [0, 3, 3]])
def test_grouped_matmul(check_op: Any, ends: list[int], transpose_w: bool) -> None:
    rows = torch.randn(ends[-1], 3, requires_grad=True)
    w = torch.randn(3, *((5, 3) if transpose_w else (3, 5)), requires_grad=True)
    offsets = torch.tensor(ends, dtype=torch.int32)

    def reference(rows: Tensor, w: Tensor, _: Tensor) -> Tensor:
        expert = [sum(r >= end for end in ends) for r in range(len(rows))]
        matrices = (w.mT if transpose_w else w)[expert]
        return torch.einsum("rn,rnf->rf", rows, matrices)

    check_op("grouped_matmul", (rows, w, offsets), {"transpose_w": transpose_w}, reference)


@pytest.mark.parametrize(("tokens", "top_k"), [(4, 3), (1, 1), (1, 4), (6, 1)])
def test_combine(check_op: Any, tokens: int, top_k: int) -> None:
    order = torch.randperm(tokens * top_k)
    rows, weights = torch.randn(tokens * top_k, 5, requires_grad=True), torch.randn(tokens, top_k, requires_grad=True)

    def reference(rows: Tensor, weights: Tensor, order: Tensor) -> Tensor:
        out = [torch.zeros_like(rows[0]) for _ in range(tokens)]
        for r, pair in enumerate(order.tolist()):
            out[pair // top_k] = out[pair // top_k] + weights[pair // top_k, pair % top_k] * rows[r]
        return torch.stack(out)

    check_op("moe_combine", (rows, weights, order), {"dtype": DType.F32}, reference)
