"""The router against DeepSeek-V3's of transformers, and its losses against their formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mgraph.models import ModelConfig
from mgraph.models.router import Router


def _router(**changes: Any) -> Router:
    router = Router(ModelConfig(d_model=12, num_heads=2, num_experts=16, **changes))
    torch.nn.init.normal_(router.proj.weight, std=0.5)
    return router


@pytest.mark.parametrize(("groups", "top_groups", "top_k"), [(4, 2, 3), (8, 3, 6), (1, 1, 2), (2, 2, 16)])
def test_equals_deepseek_v3(groups: int, top_groups: int, top_k: int) -> None:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    router = _router(
        router="sigmoid",
        num_groups=groups,
        top_groups=top_groups,
        top_k=top_k,
        routed_scale=2.5,
        selection_bias=True,
    )
    assert router.selection_bias is not None
    router.selection_bias.normal_(std=0.3)
    theirs = DeepseekV3TopkRouter(
        DeepseekV3Config(
            hidden_size=12,
            n_routed_experts=16,
            num_experts_per_tok=top_k,
            n_group=groups,
            topk_group=top_groups,
            routed_scaling_factor=2.5,
            norm_topk_prob=True,
        )
    )
    with torch.no_grad():
        theirs.weight.copy_(router.proj.weight)
        theirs.e_score_correction_bias.copy_(router.selection_bias)
    x = torch.randn(37, 12)
    weights, experts, _ = router(x)
    _, expected_weights, expected = theirs(x)
    dense, expected_dense = (
        torch.zeros(37, 16).scatter(1, i, w) for i, w in ((experts, weights), (expected, expected_weights))
    )
    torch.testing.assert_close(dense, expected_dense)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid", "topk_softmax"])
def test_losses_are_their_formulas_in_float64(kind: Any) -> None:
    router = _router(router=kind, top_k=3, balance_loss=0.3, z_loss=0.02)
    x = torch.randn(29, 12)
    _, _, loss = router(x)
    logits = router.proj(x).double()
    scores = logits.sigmoid() if kind == "sigmoid" else logits.softmax(-1)
    scores = scores / scores.sum(-1, keepdim=True)
    tokens = torch.bincount(scores.topk(3).indices.flatten(), minlength=16)
    balance = 16 / (3 * 29**2) * (tokens * scores.sum(0)).sum()
    expected = 0.3 * balance + 0.02 * (logits.exp().sum(-1).log() ** 2).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_an_even_router_has_the_coefficient_as_its_balance_loss() -> None:
    router = _router(top_k=2, balance_loss=0.3)
    torch.nn.init.zeros_(router.proj.weight)
    assert router(torch.randn(8, 12))[2].item() == pytest.approx(0.3)


def test_jitter_is_for_training_only() -> None:
    router = _router(jitter=0.2)
    x = torch.randn(29, 12)
    assert not torch.equal(router(x)[0], router(x)[0])
    router.eval()
    assert torch.equal(router(x)[0], router(x)[0])
    weights = router.proj(x).softmax(-1).topk(2).values
    assert torch.equal(router(x)[0], weights / weights.sum(-1, keepdim=True))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"router": "soft"}, "router is 'soft', and must be one of softmax, topk_softmax, sigmoid"),
        ({"capacity_keeps": "first"}, "capacity_keeps is 'first', and must be one of weight, position"),
        ({"jitter": -5.0}, "jitter is -5.0, and must be at least 0, for none, and less than 1"),
        ({"jitter": 2.0}, "jitter is 2.0, and must be at least 0, for none, and less than 1"),
        ({"jitter": float("nan")}, "jitter is nan, and must be"),
        ({"choice_jitter": 1.0}, "choice_jitter is 1.0, and must be at least 0, for none, and less than 1"),
        ({"capacity_factor": -1.0}, "capacity_factor is -1.0, and must be positive and finite, or 0 for none"),
        ({"balance_loss": float("nan")}, "balance_loss is nan, and must be"),
        ({"z_loss": float("inf")}, "z_loss is inf, and must be"),
        ({"routed_scale": float("nan")}, "routed_scale is nan, and must be finite"),
    ],
)
def test_options_without_a_meaning_are_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ModelConfig(num_experts=4, **changes)
