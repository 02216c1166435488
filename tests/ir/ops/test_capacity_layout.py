"""Rows by capacity: what lies where, against loops over experts; gradients against torch's own of written-out sums."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mgraph.ir.dims import evaluate, symbol
from mgraph.ir.opdef import op_def
from mgraph.ir.ops.capacity_layout import capacity
from mgraph.ir.types import DType
from tests.ir.ops.test_expert_exchange import body, routing

CASES = [
    # tokens, choices, experts, factor
    (9, 2, 5, 1.0),
    (7, 3, 4, 0.5),
    (1, 1, 4, 1.25),
    (3, 2, 8, 1.1),  # fewer tokens than experts
    (6, 2, 4, 3.0),  # room for all
]


def case(tokens: int, choices: int, experts: int, factor: float) -> tuple[Tensor, Tensor, Tensor, int]:
    """x, weights, choices of which some are dropped, and the rows of an expert."""
    drawn = torch.Generator().manual_seed(tokens)
    weights = torch.rand(tokens, choices, dtype=torch.float64, generator=drawn)
    attrs = {"num_experts": experts, "factor": factor}
    weights, indices = body("moe_capacity", weights, routing(tokens, choices, experts), **attrs)
    room = min(tokens, math.ceil(tokens * choices * factor / experts - 1e-9))
    return torch.randn(tokens, 3, dtype=torch.float64, generator=drawn), weights, indices, room


@pytest.mark.parametrize("given", CASES)
def test_each_expert_has_its_tokens_and_zeros(given: tuple[int, int, int, float]) -> None:
    x, _, indices, room = case(*given)
    experts = given[2]
    rows, places = body("padded_dispatch", x, indices, num_experts=experts, factor=given[3])
    assert rows.shape == (experts * room, 3)
    for expert, own in enumerate(rows.split(room)):
        tokens = [t for t, chosen in enumerate(indices.tolist()) if expert in chosen]
        assert torch.equal(own[: len(tokens)], x[tokens]) and not own[len(tokens) :].any()
    kept = indices < experts
    assert torch.equal(places >= 0, kept) and torch.equal(places[kept] // room, indices[kept])
    assert body("even_ends", rows, num_experts=experts).tolist() == [room * (e + 1) for e in range(experts)]


@pytest.mark.parametrize("given", CASES)
def test_sums_and_gradients(given: tuple[int, int, int, float]) -> None:
    x, weights, indices, _ = case(*given)
    rows, places = body("padded_dispatch", x, indices, num_experts=given[2], factor=given[3])
    y = torch.randn_like(rows).requires_grad_()
    weights = weights.clone().requires_grad_()
    picked = torch.nn.functional.one_hot(places.clamp(min=0), len(rows)).double() * (places >= 0)[..., None]
    expected = torch.einsum("tk,tkr,rn->tn", weights, picked, y)
    torch.testing.assert_close(body("padded_combine", y, weights, places, dtype=DType.F64), expected)
    dy = torch.randn_like(expected)
    drows, dweights = torch.autograd.grad(expected, (y, weights), dy)
    found = body("padded_combine_grad", dy, y.detach(), weights.detach(), places)
    torch.testing.assert_close(found[0], drows)
    torch.testing.assert_close(found[1], dweights)
    dx = body("unpack_rows", drows, places, part=0.0)
    torch.testing.assert_close(dx, torch.einsum("tkr,rn->tn", picked, drows))


def test_blocks() -> None:
    x = torch.arange(24).view(12, 2)
    swapped = body("swap_blocks", x, first=2, second=3)
    assert torch.equal(swapped, torch.cat([x[[2 * e, 2 * e + 1, 6 + 2 * e, 7 + 2 * e]] for e in range(3)]))
    assert torch.equal(body("swap_blocks", swapped, first=3, second=2), x)
    for name in ("padded_send", "padded_return"):
        assert op_def(name).body(x, num_experts=3) is x


@pytest.mark.parametrize(("choices", "experts", "factor"), [(2, 8, 1.1), (2, 5, 2.5), (3, 4, 0.5), (1, 10, 0.3)])
def test_capacity_of_any_number_of_tokens(choices: int, experts: int, factor: float) -> None:
    """`factor` is the decimal that it is written as."""
    dim = capacity(symbol("T"), choices, experts, factor)
    for tokens in (1, 2, 10, 97):
        wanted = min(tokens, -(-round(tokens * choices * factor * 10) // (10 * experts)))
        assert evaluate(dim, {"T": tokens}) == capacity(tokens, choices, experts, factor) == wanted
