"""The fused ops of experts against the ops that they stand for, which have loops as their reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mgraph.ir.opdef import op_def
from mgraph.ir.types import DType

EXPERTS, CHOICES, WIDTH, UNIT, TOKENS = 4, 2, 6, 5, 5
INDICES = torch.tensor([[0, 2], [3, 2], [0, 3], [2, 0], [3, 0]])  # expert 1 is empty
OPTIONS: dict[str, Any] = {"act": "silu", "limit": 1.5, "offset": 0.5}


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def one_by_one(rows: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    """Each row by its matrix."""
    ends = offsets.tolist()
    return torch.stack([row @ w[sum(r >= end for end in ends)] for r, row in enumerate(rows)])


def unit(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=1.5), up.clamp(-1.5, 1.5)
    return gate * gate.sigmoid() * (up + 0.5)


def test_order() -> None:
    order, offsets = op_def("moe_order").body(INDICES, num_experts=EXPERTS)
    pairs = sorted((int(expert), pair) for pair, expert in enumerate(INDICES.flatten()))
    assert order.tolist() == [pair for _, pair in pairs]
    assert offsets.tolist() == [4, 4, 7, 10] and offsets.dtype is torch.int32
    logits = torch.zeros(TOKENS, EXPERTS, dtype=torch.float64).scatter(
        1, INDICES, torch.tensor([[2.0, 1.0]] * TOKENS).double()
    )
    weights, indices, *rest = op_def("moe_route_order").body(logits, top_k=CHOICES, renormalize=True)
    assert torch.equal(indices, INDICES) and torch.equal(rest[0], order) and torch.equal(rest[1], offsets)
    torch.testing.assert_close(weights.sum(1), torch.ones(TOKENS, dtype=weights.dtype))


@pytest.mark.parametrize("transpose_w", [False, True])
def test_units_and_their_gradients(transpose_w: bool) -> None:
    """Forward row by row; backward as torch's autograd has it, through the product after and the weighted sum."""
    torch.manual_seed(0)
    order, offsets = op_def("moe_order").body(INDICES, num_experts=EXPERTS)
    token = order // CHOICES
    x, wg, wu = draw(TOKENS, WIDTH), draw(EXPERTS, WIDTH, UNIT), draw(EXPERTS, WIDTH, UNIT)
    wd, weights, dy = draw(EXPERTS, UNIT, WIDTH), draw(TOKENS, CHOICES).requires_grad_(), draw(TOKENS, WIDTH)

    def stored(w: Tensor) -> Tensor:
        return w.transpose(1, 2).contiguous() if transpose_w else w

    options = {**OPTIONS, "top_k": CHOICES, "transpose_w": transpose_w}
    y, gate, up = op_def("expert_glu").body(x, order, offsets, stored(wg), stored(wu), keep=True, **options)
    torch.testing.assert_close(gate, one_by_one(x[token], wg, offsets))
    torch.testing.assert_close(up, one_by_one(x[token], wu, offsets))
    torch.testing.assert_close(y, unit(gate, up))
    alone = op_def("expert_glu").body(x, order, offsets, stored(wg), stored(wu), **options)
    assert torch.equal(alone, y)
    gate, up = gate.requires_grad_(), up.requires_grad_()
    share = weights.flatten()[order][:, None]
    total = torch.zeros_like(dy).index_add(0, token, share * one_by_one(unit(gate, up), wd, offsets))
    expected = torch.autograd.grad(total, (gate, up, weights), dy)
    with torch.no_grad():
        operands = (dy, weights, order, offsets, stored(wd), gate, up)
        dgate, dup, weighted, dweights = op_def("expert_glu_grad").body(*operands, **options)
        torch.testing.assert_close((dgate, dup, dweights), expected)
        torch.testing.assert_close(weighted, share * unit(gate, up))
        both = op_def("grouped_matmul_sum").body(
            dgate, stored(wg), dup, stored(wu), offsets, transpose_w=not transpose_w
        )
        backwards = [w.transpose(1, 2) for w in (wg, wu)]
        ideal = one_by_one(dgate, backwards[0], offsets) + one_by_one(dup, backwards[1], offsets)
        torch.testing.assert_close(both, ideal)


def test_order_of_a_step_that_is_filled_up() -> None:
    """Tokens from the last start on come last, and are of no expert; weights and indices are as ever."""
    logits, starts = draw(TOKENS, EXPERTS), torch.tensor([0, 2, 3], dtype=torch.int32)
    weights, indices = op_def("moe_route").body(logits, top_k=CHOICES)
    got = op_def("moe_route_order").body(logits, starts, top_k=CHOICES, ended=True)
    assert torch.equal(got[0], weights) and torch.equal(got[1], indices)
    order, offsets = op_def("moe_order").body(indices[:3], num_experts=EXPERTS)
    assert got[2].tolist() == [*order.tolist(), *range(3 * CHOICES, TOKENS * CHOICES)]
    assert torch.equal(got[3], offsets)


@pytest.mark.parametrize("packed", ["halves", "pairs"])
@pytest.mark.parametrize("transpose_w", [False, True])
def test_packed_units_with_biases(packed: str, transpose_w: bool) -> None:
    torch.manual_seed(1)
    order, offsets = op_def("moe_order").body(INDICES, num_experts=EXPERTS)
    x, w, bias = draw(TOKENS, WIDTH), draw(EXPERTS, WIDTH, 2 * UNIT), draw(EXPERTS, 2 * UNIT)
    both = one_by_one(x[order // CHOICES], w, offsets) + bias[INDICES.flatten()[order]]
    gate, up = (both[:, :UNIT], both[:, UNIT:]) if packed == "halves" else (both[:, ::2], both[:, 1::2])
    given = w.transpose(1, 2).contiguous() if transpose_w else w
    options: dict[str, Any] = {**OPTIONS, "top_k": CHOICES, "transpose_w": transpose_w, "packed": packed}
    got = op_def("expert_glu").body(x, order, offsets, given, bias, **options)
    torch.testing.assert_close(got, unit(gate, up))


@pytest.mark.parametrize(("biased", "ended"), [(False, False), (True, False), (False, True)])
def test_weighed_sums(biased: bool, ended: bool) -> None:
    """Token by token; with `ended` the last two tokens have no expert, and what their rows hold does not count."""
    torch.manual_seed(2)
    real = TOKENS - 2 * ended
    indices = INDICES.where(torch.arange(TOKENS)[:, None] < real, EXPERTS)
    order, offsets = op_def("moe_order").body(indices, num_experts=EXPERTS, others=ended)
    rows, w, bias = draw(TOKENS * CHOICES, UNIT), draw(EXPERTS, UNIT, WIDTH), draw(EXPERTS, WIDTH)
    rows[int(offsets[-1]) :] = float("nan")
    weights = draw(TOKENS, CHOICES)
    want = torch.zeros(TOKENS, WIDTH, dtype=torch.float64)
    for r, pair in enumerate(order.tolist()[: CHOICES * real]):
        expert = int(indices.flatten()[pair])
        out = rows[r] @ w[expert] + (bias[expert] if biased else 0)
        want[pair // CHOICES] += weights.flatten()[pair] * out
    options = {"dtype": DType.F64, "ended": ended}
    given = (rows, w, weights, order, offsets, *([bias] if biased else []))
    torch.testing.assert_close(op_def("expert_sum").body(*given, **options), want)
    turned = (rows, w.transpose(1, 2).contiguous(), *given[2:])
    torch.testing.assert_close(op_def("expert_sum").body(*turned, transpose_w=True, **options), want)


@pytest.mark.parametrize("side", ["left", "right"])
def test_outer_products_of_taken_rows(side: str) -> None:
    order, offsets = op_def("moe_order").body(INDICES, num_experts=EXPERTS)
    tokens, rows = draw(TOKENS, WIDTH), draw(TOKENS * CHOICES, UNIT)
    sides = (tokens, rows) if side == "left" else (rows, tokens)
    got = op_def("gathered_outer").body(*sides, order, offsets, top_k=CHOICES, side=side)
    want = torch.zeros_like(got)
    for r, pair in enumerate(order.tolist()):
        taken = tokens[pair // CHOICES]
        left, right = (taken, rows[r]) if side == "left" else (rows[r], taken)
        want[INDICES.flatten()[pair]] += torch.outer(left, right)
    torch.testing.assert_close(got, want)
