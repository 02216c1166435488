"""Published shapes have their published numbers of parameters; contradictory options are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mgraph import models


@pytest.mark.parametrize(
    ("name", "size", "parameters"),
    [
        ("dense", "100m", 101_081_856),
        ("moe", "100m", 107_258_368),
        ("tinyllama", "1.1b", 1_100_048_384),
        ("llama2", "7b", 6_738_415_616),
        ("llama3", "8b", 8_030_261_248),
        ("llama3.1", "8b", 8_030_261_248),
        ("qwen3", "8b", 8_190_735_360),
        ("qwen3", "30b-a3b", 30_532_122_624),
        ("mixtral", "8x7b", 46_702_792_704),
        ("gpt-oss", "20b", 20_914_757_184),
        ("gemma3", "4b", 3_880_263_168),
    ],
)
def test_published_sizes(name: str, size: str, parameters: int) -> None:
    with torch.device("meta"):
        model = models.get(name, size)
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 3}, "multiple of num_heads"),
        ({"num_heads": 0}, "num_heads is 0, and must be a whole number of at least 1$"),
        ({"d_ff": 64.0}, "d_ff is 64.0, and must be a whole number of at least 1$"),
        ({"num_layers": -1}, "num_layers is -1, and must"),
        ({"num_experts": -4}, "num_experts is -4, and must be a whole number of at least 1, or 0 for none"),
        ({"num_experts": 8, "shared_d_ff": -4}, "shared_d_ff is -4, and must be a whole number of at least 1, or 0"),
        ({"num_experts": 8, "num_groups": 0}, "num_groups is 0, and must"),
        ({"num_experts": 8, "top_k": 0}, "top_k is 0, and must"),
        ({"rope_fraction": 0.2}, "rotates 3 of 16"),
        ({"window_pattern": 2}, "need a window"),
        ({"window": 4, "window_pattern": (True,)}, "1 flags for 2 layers"),
        ({"act": "relu_squared", "gate_clamp": 1.0}, "no gate"),
        ({"z_loss": 0.1}, "need num_experts"),
        ({"num_experts": 8, "top_k": 9}, "top_k 9"),
        ({"num_experts": 8, "top_k": 1}, "always be 1"),
        ({"num_experts": 8, "selection_bias": True}, "sigmoid"),
        ({"num_experts": 8, "num_groups": 3}, "equal groups"),
        ({"num_experts": 8, "num_groups": 4, "top_groups": 1, "top_k": 3}, "hold top_k 3"),
        ({"num_experts": 8, "num_groups": 2, "router": "topk_softmax"}, "groups are chosen"),
    ],
)
def test_contradictions_are_explained(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        models.get("dense", "tiny", **changes)


def test_unknown_names_are_explained() -> None:
    with pytest.raises(KeyError, match="dense, gemma3"):
        models.get("mor")
    with pytest.raises(
        KeyError, match="tiny, tiny-grouped, tiny-losses, tiny-capacity, tiny-jitter, tiny-choice-jitter, demo, 100m"
    ):
        models.get("moe", "7b")


def test_windows_by_layer() -> None:
    config = models.ModelConfig(num_layers=6, window=4, window_pattern=3)
    assert config.windows == (4, 4, 0, 4, 4, 0)
    assert models.ModelConfig(window=4).windows == (4, 4)
    assert models.ModelConfig(window=4, window_pattern=(False, True)).windows == (0, 4)


def test_initial_weights() -> None:
    model = models.get("dense", "tiny", d_model=256, d_ff=512)
    weights = dict(model.named_parameters())
    assert weights["layers.0.attn.q.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert weights["layers.1.ffn.down.weight"].std().item() == pytest.approx(0.01, rel=0.05)
    assert torch.equal(weights["norm.weight"], torch.ones(256))
    assert torch.equal(models.get("gemma3", "tiny").norm.weight, torch.zeros(64))
