"""What fills rows up is no expert's and changes nothing: a layer with experts, its router's losses, its capacity."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mgraph.models import Decoder, ModelConfig
from mgraph.models.capacity import within_capacity, without_padding
from mgraph.models.custom_router import use_router
from mgraph.models.experts import Experts
from mgraph.models.router import Router, mean_of

BASE = ModelConfig(vocab_size=11, d_model=12, num_heads=2, d_ff=10, num_layers=2, num_experts=5, top_k=2)
CASES: list[dict[str, Any]] = [
    {"balance_loss": 0.5, "z_loss": 0.25},
    {"balance_loss": 0.5, "router": "sigmoid", "mlp_bias": True, "shared_d_ff": 6},
    {"z_loss": 0.5, "router": "topk_softmax", "top_k": 3},
]
REAL = torch.tensor([[True, True, False, True, False], [False, True, True, True, False]])


class First(nn.Module):
    """A router that takes the first experts."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.scale * torch.ones(len(x), 2).to(x), torch.arange(2).expand(len(x), 2).contiguous()


def drawn(config: ModelConfig) -> Experts:
    """A layer with large weights, in float64."""
    layer = Experts(config).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.5)
    return layer


def gradients(layer: nn.Module, x: Tensor, made: tuple[Tensor, Tensor | None], wanted: Tensor) -> list[Tensor]:
    """Of a cotangent and the loss, for the tokens and all parameters."""
    y, loss = made
    total = (y * wanted).sum() + (0.0 if loss is None else loss)
    return list(torch.autograd.grad(total, [x, *layer.parameters()], materialize_grads=True))


@pytest.mark.parametrize("changes", CASES, ids=str)
def test_a_layer_gives_what_it_gives_to_real_tokens_alone(changes: dict[str, Any]) -> None:
    layer = drawn(replace(BASE, **changes))
    x = torch.randn(2, 5, 12, dtype=torch.float64, requires_grad=True)
    wanted = torch.randn(2, 5, 12, dtype=torch.float64) * REAL[..., None]
    alone, y = layer(x[REAL][None]), layer(x, REAL)
    torch.testing.assert_close(y[0][REAL], alone[0][0], rtol=1e-6, atol=1e-7)  # routers work in f32
    torch.testing.assert_close(y[1], alone[1], rtol=1e-6, atol=1e-7)
    expected = gradients(layer, x, alone, wanted[REAL][None])
    for found, other in zip(gradients(layer, x, y, wanted), expected, strict=True):
        torch.testing.assert_close(found, other, rtol=1e-5, atol=1e-7)
    weights, experts, _ = layer.router(x.flatten(0, 1), REAL.flatten())
    padding = ~REAL.flatten()
    assert (experts[padding] == 5).all() and (experts[~padding] < 5).all() and not weights[padding].any()


def test_padding_takes_no_room() -> None:
    """Of a capacity: the first tokens of an expert are the first real ones."""
    config = replace(BASE, capacity_factor=0.5, capacity_keeps="position", num_experts=2, top_k=2)
    layer = drawn(config)
    real = torch.tensor([False] * 4 + [True] * 4)
    _, experts, _ = layer.router(torch.randn(8, 12, dtype=torch.float64), real)
    taken = [(experts == e).any(1).tolist() for e in range(2)]
    assert taken == [[False] * 4 + [True] * 4] * 2  # each has room for 8 * 2 / 2 * 0.5


class Own(Router):
    """One that is called as it always was."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:  # type: ignore[override]
        return super().forward(x)


class Knowing(First):
    """A router that is told what is padding."""

    def forward(self, x: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
        weights, experts = super().forward(x)
        assert real is not None, "it is asked about packed rows"
        weights, experts = without_padding(weights, experts, real, 5)
        weights, experts = within_capacity(weights, experts, 5, 0.5, "position")
        return weights, experts


def test_routers_of_all_kinds_drop_padding() -> None:
    real, x = REAL.flatten(), torch.randn(10, 12)
    for make in (First, Own, Router):
        model = use_router(Decoder(BASE), make)
        layer = model.layers[0].ffn  # type: ignore[union-attr, index]
        assert isinstance(layer, Experts)
        _, experts, _ = layer.chosen(x, real)
        assert (experts[~real] == 5).all() and (experts[real] < 5).all()
        assert (layer.chosen(x, None)[1] < 5).all()
        model(torch.randint(11, (2, 5)), torch.arange(5).expand(2, 5), REAL.long())
    layer = use_router(Decoder(BASE), Knowing).layers[0].ffn  # type: ignore[union-attr, index]
    assert isinstance(layer, Experts)
    _, experts, _ = layer.chosen(x, real)
    assert [int((experts == e).sum()) for e in range(2)] == [2, 2], "each has room for 10 * 2 / 5 * 0.5"
    assert (experts[real][:2] < 5).all(), "the first real tokens have it"


def test_segment_0_is_padding() -> None:
    """Whatever it holds, nothing else changes, and its own loss is none."""
    model = Decoder(replace(BASE, balance_loss=0.5, z_loss=0.5))
    tokens, segments = torch.randint(11, (2, 6)), torch.tensor([[1, 1, 2, 2, 0, 0], [3, 3, 3, 0, 0, 0]])
    positions = torch.arange(6).expand(2, 6)
    other = torch.where(segments == 0, (tokens + 1) % 11, tokens)
    before, after = (model(t, positions, segments) for t in (tokens, other))
    torch.testing.assert_close(before.aux_loss, after.aux_loss)
    torch.testing.assert_close(before.logits[segments != 0], after.logits[segments != 0])
    third = model(tokens, positions, segments + 1)
    assert not torch.isclose(third.aux_loss, before.aux_loss)


def test_the_mean_of_nothing_is_0() -> None:
    assert mean_of(torch.full((3, 2), float("nan")), torch.zeros(3, dtype=torch.bool)).tolist() == [0.0, 0.0]
    layer = drawn(replace(BASE, balance_loss=0.5, z_loss=0.5))
    y, loss = layer(torch.randn(1, 3, 12, dtype=torch.float64), torch.zeros(1, 3, dtype=torch.bool))
    assert not y.any() and loss.detach() == 0.0
