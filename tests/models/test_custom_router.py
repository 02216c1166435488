"""Routers of a user's own: what they must give, and what is said of one that does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mgraph import models
from mgraph.models.custom_router import use_router


class Hash(nn.Module):
    """Expert n and the one after it, for the n-th token."""

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        first = torch.arange(tokens.shape[0]) % 8
        experts = torch.stack([first, (first + 1) % 8], 1)
        return torch.full(experts.shape, 0.5), experts


class Given(nn.Module):
    """Gives what it was made with."""

    def __init__(self, made: Any) -> None:
        super().__init__()
        self.made = made

    def forward(self, tokens: Tensor) -> Any:
        return self.made


def test_the_output_is_that_of_the_experts_one_by_one() -> None:
    layer = use_router(models.get("moe", "tiny"), lambda config: Hash()).layers[0].ffn  # type: ignore[union-attr,index]
    x = torch.randn(2, 7, 64)
    made, loss = layer(x)
    wanted = torch.zeros(14, 64)
    for token, row in enumerate(x.flatten(0, 1)):
        for expert in (token % 8, (token + 1) % 8):
            gate, up, down = (getattr(layer, name).weight[expert] for name in ("gate", "up", "down"))
            wanted[token] += 0.5 * (torch.nn.functional.silu(row @ gate) * (row @ up)) @ down
    assert loss is None
    torch.testing.assert_close(made.flatten(0, 1), wanted, rtol=1e-4, atol=1e-6)


class Dropping(nn.Module):
    """Expert 1 and, for every other token, 5 with a weight, or none with another."""

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        second = torch.where(torch.arange(tokens.shape[0]) % 2 == 0, 5, 8)
        return torch.full((tokens.shape[0], 2), 0.5), torch.stack([torch.ones_like(second), second], 1)


def one(part: Any, expert: int, row: Tensor) -> Tensor:
    """The linear map of one expert."""
    made: Tensor = row @ part.weight[expert]
    return made if part.bias is None else made + part.bias[expert]


@pytest.mark.parametrize("bias", [False, True])
def test_the_number_of_all_experts_drops_a_choice(bias: bool) -> None:
    model = use_router(models.get("moe", "tiny", mlp_bias=bias), lambda config: Dropping())
    layer = model.layers[0].ffn  # type: ignore[union-attr,index]
    x = torch.randn(2, 7, 64, requires_grad=True)
    made, _ = layer(x)
    wanted = []
    for token, row in enumerate(x.flatten(0, 1)):
        total = torch.zeros(64)
        for expert in (1, 5) if token % 2 == 0 else (1,):
            hidden = torch.nn.functional.silu(one(layer.gate, expert, row)) * one(layer.up, expert, row)
            total = total + 0.5 * one(layer.down, expert, hidden)
        wanted.append(total)
    expected = torch.stack(wanted).view_as(made)
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-6)
    leaves = [x, layer.up.weight, layer.down.weight]
    for got, other in zip(
        torch.autograd.grad(made.square().sum(), leaves),
        torch.autograd.grad(expected.square().sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(got, other, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"capacity_factor": 1.0}, "capacity_factor is for the router of the zoo.* by models.capacity.within_capacity"),
        ({"capacity_keeps": "position"}, "capacity_keeps is for .* has to do that itself"),
        ({"balance_loss": 0.1}, "balance_loss is for .* itself: build the model with balance_loss=0.0$"),
        ({"jitter": 0.1, "z_loss": 0.1}, "jitter, z_loss are for .*: build the model with jitter=0.0, z_loss=0.0$"),
        ({"choice_jitter": 0.1}, "choice_jitter is for"),
        ({"renormalize": False, "routed_scale": 2.5}, "renormalize, routed_scale are for .*renormalize=True"),
        ({"router": "topk_softmax", "router_bias": True}, "router, router_bias are for .* with router='softmax', "),
        ({"router": "sigmoid", "selection_bias": True}, "router, selection_bias are for"),
        ({"num_groups": 4, "top_groups": 2}, "num_groups, top_groups are for"),
    ],
    ids=str,
)
def test_what_the_router_that_is_replaced_would_do_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        use_router(models.get("moe", "tiny", **options), lambda config: Hash())


@pytest.mark.parametrize("options", [{"top_k": 3}, {"top_k": 1, "renormalize": False}, {"shared_d_ff": 48}], ids=str)
def test_what_is_not_of_the_router_alone_stays(options: dict[str, Any]) -> None:
    use_router(models.get("moe", "tiny", **options), lambda config: Hash())


WEIGHTS, EXPERTS = torch.rand(6, 2), torch.zeros(6, 2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("made", "error", "told"),
    [
        (WEIGHTS, TypeError, r"the router Given gave float32\[6, 2\]; expected"),
        ((WEIGHTS, None), TypeError, r"\(float32\[6, 2\], None\)"),
        ((WEIGHTS, EXPERTS.int()), TypeError, r"int32\[6, 2\]"),
        ((EXPERTS, EXPERTS), TypeError, r"\(int64\[6, 2\], int64"),
        ((WEIGHTS[:5], EXPERTS[:5]), ValueError, r"for tokens \[6, 64\]"),
        ((WEIGHTS[:, :1], EXPERTS), ValueError, r"float32\[6, 1\], int64\[6, 2\]"),
        (
            (torch.rand(6, 9), torch.zeros(6, 9, dtype=torch.int64)),
            ValueError,
            "chose 9 experts a token, expected 1 to 8",
        ),
        ((WEIGHTS, EXPERTS, torch.zeros(2)), ValueError, r"the loss float32\[2\]"),
    ],
)
def test_what_breaks_the_contract_is_told_of(made: Any, error: type[Exception], told: str) -> None:
    layer = use_router(models.get("moe", "tiny"), lambda config: Given(made)).layers[0].ffn  # type: ignore[union-attr,index]
    with pytest.raises(error, match=told):
        layer(torch.randn(2, 3, 64))


def test_a_model_without_experts_has_no_router() -> None:
    with pytest.raises(ValueError, match="no layer of the model has experts"):
        use_router(models.get("dense", "tiny"), lambda config: Hash())
    with pytest.raises(TypeError, match="the router is a int, expected a module"):
        use_router(models.get("moe", "tiny"), lambda config: 7)  # type: ignore[arg-type,return-value]
