"""Routing, dispatch, grouped products and combination against loops over tokens and experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mgraph.ir.types import DType

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


def test_grouped_matmul_with_bias(check_op: Any) -> None:
    rows, w = torch.randn(5, 3, requires_grad=True), torch.randn(4, 3, 2, requires_grad=True)
    bias, ends = torch.randn(4, 2, requires_grad=True), torch.tensor([2, 2, 5, 5], dtype=torch.int32)
    experts = [0, 0, 2, 2, 2]

    def reference(rows: Tensor, w: Tensor, _: Tensor, bias: Tensor) -> Tensor:
        return torch.einsum("rn,rnf->rf", rows, w[experts]) + bias[experts]

    check_op("grouped_matmul", (rows, w, ends, bias), {}, reference)


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


def test_rows_of_no_expert(check_op: Any) -> None:
    """They come last and count for nothing, with gradients, whatever stands there."""
    indices = torch.tensor([[2, 3], [3, 3], [0, 2]])  # 3: of no expert of the three
    x = torch.randn(3, 4, requires_grad=True)
    order, ends = torch.tensor([4, 0, 5, 1, 2, 3]), torch.tensor([1, 1, 3], dtype=torch.int32)

    def dispatched(x: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        real = torch.tensor([1.0, 1, 1, 0, 0, 0])[:, None]  # so that nothing flows back through the others
        rows = x[order // 2]
        return rows * real + (rows * (1 - real)).detach(), order, ends

    check_op("moe_dispatch", (x, indices), {"num_experts": 3, "others": True}, dispatched)
    rows, weights = torch.randn(6, 4, requires_grad=True), torch.randn(3, 2, requires_grad=True)

    def combined(rows: Tensor, weights: Tensor, *_: Tensor) -> Tensor:
        first = weights[0, 0] * rows[1]
        return torch.stack([first, torch.zeros_like(first), weights[2, 0] * rows[0] + weights[2, 1] * rows[2]])

    check_op("moe_combine", (rows, weights, order, ends), {"dtype": DType.F32}, combined)
