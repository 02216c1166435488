"""The ops that take tokens to the experts of other ranks, beside loops that say where each row goes."""

from __future__ import annotations

import itertools

import pytest
import torch

from mgraph.ir.opdef import op_def

CASES = [
    # tokens, choices, experts, ranks
    (7, 2, 8, 2),
    (7, 3, 8, 4),
    (1, 1, 4, 2),
    (3, 2, 16, 8),  # fewer tokens than experts
    (5, 4, 4, 2),  # every expert of every token
]


def routing(tokens: int, choices: int, experts: int) -> torch.Tensor:
    """Distinct experts of each token."""
    drawn = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(tokens * experts + choices))
    return drawn.topk(choices, -1).indices


def body(name: str, *operands: torch.Tensor, **attrs: object) -> torch.Tensor:
    made: torch.Tensor = op_def(name).body(*operands, **op_def(name).complete(attrs))
    return made


@pytest.mark.parametrize(("tokens", "choices", "experts", "ranks"), CASES)
def test_a_token_goes_once_to_each_rank(tokens: int, choices: int, experts: int, ranks: int) -> None:
    indices = routing(tokens, choices, experts)
    places = body("expert_places", indices, num_experts=experts, ranks=ranks)
    own = experts // ranks
    for rank in range(ranks):
        going = [t for t in range(tokens) if any(e // own == rank for e in indices[t].tolist())]
        expected = torch.full((tokens,), -1)
        expected[going] = torch.arange(len(going))
        assert torch.equal(places[:, rank], expected)


@pytest.mark.parametrize(("tokens", "choices", "experts", "ranks"), CASES)
def test_rows_are_packed_and_unpacked(tokens: int, choices: int, experts: int, ranks: int) -> None:
    indices = routing(tokens, choices, experts)
    places = body("expert_places", indices, num_experts=experts, ranks=ranks)
    x = torch.randn(tokens, 3, dtype=torch.float64)
    packed = body("pack_rows", x, places, rows="R", fill=-1)
    expected = torch.full((ranks * tokens, 3), -1.0, dtype=torch.float64)
    for token, rank in itertools.product(range(tokens), range(ranks)):
        if places[token, rank] >= 0:
            expected[rank * tokens + places[token, rank]] = x[token]
    assert torch.equal(packed, expected)
    back = body("unpack_rows", packed, places)
    torch.testing.assert_close(back, x * (places >= 0).sum(1, keepdim=True))


@pytest.mark.parametrize(("tokens", "choices", "experts", "ranks"), CASES)
def test_packing_and_unpacking_are_adjoint(tokens: int, choices: int, experts: int, ranks: int) -> None:
    places = body("expert_places", routing(tokens, choices, experts), num_experts=experts, ranks=ranks)
    x, y = torch.randn(tokens, 3, dtype=torch.float64), torch.randn(ranks * tokens, 3, dtype=torch.float64)
    left = (body("pack_rows", x, places, rows="R") * y).sum()
    torch.testing.assert_close(left, (x * body("unpack_rows", y, places)).sum())


def test_experts_of_other_ranks_are_none_of_ours() -> None:
    indices = torch.tensor([[0, 5], [4, 7], [-1, -1]])
    own = body("own_choices", indices, torch.tensor(1), num_experts=8, ranks=2)
    assert own.tolist() == [[4, 1], [0, 3], [4, 4]]
