"""The dense decoder equals the Llama class of transformers given the same weights, and exports with dynamic dims."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export
from torch.torch_version import TorchVersion

from mgraph import models
from mgraph.models import ModelConfig

RENAMED = {
    "embed.": "model.embed_tokens.",
    "layers.": "model.layers.",
    "norm.": "model.norm.",
    "head.": "lm_head.",
    ".attn_norm.": ".input_layernorm.",
    ".ffn_norm.": ".post_attention_layernorm.",
    ".attn.": ".self_attn.",
    ".q.": ".q_proj.",
    ".k.": ".k_proj.",
    ".v.": ".v_proj.",
    ".o.": ".o_proj.",
    ".ffn.": ".mlp.",
    ".gate.": ".gate_proj.",
    ".up.": ".up_proj.",
    ".down.": ".down_proj.",
}


def _llama(config: ModelConfig, weights: dict[str, Tensor]) -> nn.Module:
    """The Llama of transformers with our weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    llama: nn.Module = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            intermediate_size=config.d_ff,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            hidden_act={"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh", "gelu": "gelu"}[config.act],
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings=config.tie_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        )
    )
    renamed = {}
    for name, weight in weights.items():
        for ours, theirs in RENAMED.items():
            if name.startswith(ours) or (ours.startswith(".") and ours in name):
                name = name.replace(ours, theirs, 1)
        renamed[name] = weight
    llama.load_state_dict(renamed)
    return llama.eval()


def _perturb(model: nn.Module) -> None:
    """Weights far from their initial values: norms are not 1, logits are not tiny."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)


@pytest.mark.parametrize(
    "changes",
    [{}, {"act": "gelu_tanh", "tie_embeddings": True}, {"act": "gelu", "num_kv_heads": 4, "rope_theta": 500000.0}],
)
def test_equals_llama(changes: dict[str, object]) -> None:
    model = models.get("dense", "tiny", **changes)
    _perturb(model)
    config = dataclasses.replace(models.SIZES["dense"]["tiny"], **changes)  # type: ignore[arg-type]
    llama = _llama(config, model.state_dict())
    tokens = torch.randint(0, 256, (3, 37))
    positions = torch.randint(0, 1000, (3, 37)).sort().values
    with torch.no_grad():
        expected = llama(tokens, use_cache=False).logits
        assert expected.abs().max() > 0.5
        assert torch.allclose(model(tokens), expected, atol=1e-5, rtol=1e-5)
        moved = llama(tokens, position_ids=positions, attention_mask=torch.ones_like(tokens), use_cache=False).logits
        assert torch.allclose(model(tokens, positions), moved, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["dense", "moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exports_with_dynamic_dims(name: str, dtype: torch.dtype) -> None:
    with torch.device("meta"):
        model = models.get(name).to(dtype)
        tokens = torch.zeros(3, 17, dtype=torch.int64)
    dims = ({0: Dim("B", min=1), 1: Dim("S", min=2)},)
    # Before 2.12 the other mode wrongly compares strides of heads with min(16 S, 32 S).
    strict = TorchVersion(torch.__version__) < "2.12"
    program = export(model, (tokens,), dynamic_shapes=dims, strict=strict)
    (logits,) = (node for node in program.graph.nodes if node.op == "output")
    batch, sequence, vocab = logits.args[0][0].meta["val"].shape
    assert isinstance(batch, torch.SymInt) and isinstance(sequence, torch.SymInt)
    assert vocab == 256


@pytest.mark.parametrize(
    ("name", "size", "millions"),
    [
        ("dense", "100m", 101.1),
        ("dense", "tinyllama-1.1b", 1100.0),
        ("dense", "llama2-7b", 6738.4),
        ("dense", "llama3-8b", 8030.3),
        ("moe", "100m", 107.3),
        ("moe", "mixtral-8x7b", 46702.8),
    ],
)
def test_published_sizes(name: str, size: str, millions: float) -> None:
    with torch.device("meta"):
        model = models.get(name, size)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.1)


def test_initial_weights() -> None:
    model = models.get("dense", "tiny", d_model=256, d_ff=512)
    weights = dict(model.named_parameters())
    assert weights["layers.0.attn.q.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert weights["layers.1.ffn.down.weight"].std().item() == pytest.approx(0.01, rel=0.05)
    assert torch.equal(weights["norm.weight"], torch.ones(256))


def test_wrong_names_and_shapes_are_explained() -> None:
    with pytest.raises(KeyError, match="dense, moe"):
        models.get("mor")
    with pytest.raises(KeyError, match="tiny, demo, 100m"):
        models.get("moe", "7b")
    with pytest.raises(ValueError, match="multiple of num_heads"):
        models.get("dense", "tiny", num_heads=3)
    with pytest.raises(ValueError, match="top_k 9"):
        models.get("moe", "tiny", top_k=9)
