"""The mixture of experts equals a loop over tokens, values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mgraph.models.config import SIZES, ModelConfig
from mgraph.models.layers import ACTIVATIONS
from mgraph.models.moe import Experts, MixtureOfExperts


def _by_token(layer: Experts, config: ModelConfig, x: Tensor) -> Tensor:
    """One token, one expert at a time."""
    out = []
    for token in x.flatten(0, 1):
        probabilities = (layer.router.proj.weight @ token).softmax(0)
        chosen = probabilities.argsort(descending=True)[: config.top_k].tolist()
        total = sum(probabilities[e] for e in chosen) if config.renormalize else 1.0
        mixed = torch.zeros_like(token)
        for e in chosen:
            hidden = ACTIVATIONS[config.act](token @ layer.gate[e]) * (token @ layer.up[e])
            mixed = mixed + probabilities[e] / total * (hidden @ layer.down[e])
        out.append(mixed)
    return torch.stack(out).view(x.shape)


@pytest.mark.parametrize(
    ("top_k", "num_experts", "renormalize", "shape"),
    [(2, 8, True, (3, 7)), (1, 5, False, (1, 2)), (3, 3, True, (2, 5)), (4, 16, False, (1, 1))],
)
def test_layer_equals_loop_over_tokens(top_k: int, num_experts: int, renormalize: bool, shape: tuple[int, int]) -> None:
    config = ModelConfig(
        d_model=12, num_heads=2, d_ff=10, num_experts=num_experts, top_k=top_k, renormalize=renormalize
    )
    layer = Experts(config)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.5)
    x = torch.randn(*shape, 12, requires_grad=True)
    wanted = torch.randn(*shape, 12)
    leaves = [x, *layer.parameters()]
    expected = _by_token(layer, config, x)
    got = layer(x)
    assert torch.allclose(got, expected, atol=1e-5, rtol=1e-5)
    expected_grads = torch.autograd.grad((expected * wanted).sum(), leaves, materialize_grads=True)
    for gradient, expected_grad in zip(torch.autograd.grad((got * wanted).sum(), leaves), expected_grads, strict=True):
        assert torch.allclose(gradient, expected_grad, atol=1e-5, rtol=1e-5)


def test_model_is_causal_and_differentiable() -> None:
    model = MixtureOfExperts(SIZES["moe"]["tiny"])
    tokens = torch.randint(0, 256, (2, 19))
    changed = tokens.clone()
    changed[:, 11:] = (changed[:, 11:] + 1) % 256
    logits, other = model(tokens), model(changed)
    assert logits.shape == (2, 19, 256)
    assert torch.allclose(logits[:, :11], other[:, :11], atol=1e-6)
    assert not torch.allclose(logits[:, 11:], other[:, 11:], atol=1e-6)
    logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
