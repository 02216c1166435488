"""The mixture of experts equals a loop over tokens, values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mgraph import models
from mgraph.models import ModelConfig
from mgraph.models.experts import Experts
from mgraph.models.feed_forward import ACTIVATIONS


def _by_token(layer: Experts, config: ModelConfig, x: Tensor) -> Tensor:
    """One token, one expert at a time, in the router's own choice."""
    weights, experts, _ = layer.router(x.flatten(0, 1))
    out = []
    for token, row, chosen in zip(x.flatten(0, 1), weights, experts.tolist(), strict=True):
        mixed = torch.zeros_like(token)
        for weight, e in zip(row, chosen, strict=True):
            up, gate = (
                None if part is None else token @ part.weight[e] + (0 if part.bias is None else part.bias[e])
                for part in (layer.up, layer.gate)
            )
            assert up is not None
            if gate is None:
                hidden = up.relu() ** 2
            else:
                bound = config.gate_clamp or float("inf")
                hidden = ACTIVATIONS[config.act](gate.clamp(max=bound)) * (up.clamp(-bound, bound) + config.gate_offset)
            down = hidden @ layer.down.weight[e] + (0 if layer.down.bias is None else layer.down.bias[e])
            mixed = mixed + weight * down
        out.append(mixed if layer.shared is None else mixed + layer.shared(token))
    return torch.stack(out).view(x.shape)


@pytest.mark.parametrize(
    ("changes", "shape"),
    [
        ({"top_k": 2, "num_experts": 8}, (3, 7)),
        ({"top_k": 1, "num_experts": 5, "renormalize": False}, (1, 2)),
        ({"top_k": 3, "num_experts": 3, "act": "relu_squared", "mlp_bias": True}, (2, 5)),
        ({"top_k": 4, "num_experts": 16, "act": "gelu_tanh", "shared_d_ff": 6, "router": "topk_softmax"}, (1, 1)),
        (
            {"num_experts": 4, "act": "quick_gelu", "gate_clamp": 0.7, "gate_offset": 1.0, "mlp_bias": True,
             "router": "sigmoid", "routed_scale": 2.5},
            (2, 9),
        ),
    ],
)  # fmt: skip
def test_layer_equals_loop_over_tokens(changes: dict[str, Any], shape: tuple[int, int]) -> None:
    config = ModelConfig(d_model=12, num_heads=2, d_ff=10, **changes)
    layer = Experts(config)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.5)
    x = torch.randn(*shape, 12, requires_grad=True)
    wanted = torch.randn(*shape, 12)
    leaves = [x, *layer.parameters()]
    expected = _by_token(layer, config, x)
    got, loss = layer(x)
    assert loss is None
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    expected_grads = torch.autograd.grad((expected * wanted).sum(), leaves, materialize_grads=True)
    for gradient, expected_grad in zip(torch.autograd.grad((got * wanted).sum(), leaves), expected_grads, strict=True):
        torch.testing.assert_close(gradient, expected_grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("size", ["tiny", "tiny-grouped"])
def test_model_is_causal_and_differentiable(size: str) -> None:
    model = models.get("moe", size)
    tokens = torch.randint(0, 256, (2, 19))
    changed = tokens.clone()
    changed[:, 11:] = (changed[:, 11:] + 1) % 256
    logits, other = model(tokens), model(changed)
    assert logits.shape == (2, 19, 256)
    assert torch.allclose(logits[:, :11], other[:, :11], atol=1e-6)
    assert not torch.allclose(logits[:, 11:], other[:, 11:], atol=1e-6)
    logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
