"""The sizes that have names, by family: the published shapes, and tiny ones that use every option of theirs."""

from __future__ import annotations

from dataclasses import replace

from .config import Linear, Llama3, ModelConfig, Yarn

__all__ = ["SIZES"]

_TINY = ModelConfig()
_TINY_MOE = ModelConfig(d_ff=64, num_experts=8)
_LLAMA2_7B = ModelConfig(vocab_size=32000, d_model=4096, num_layers=32, num_heads=32, num_kv_heads=32, d_ff=11008)
_LLAMA3_8B = replace(_LLAMA2_7B, vocab_size=128256, num_kv_heads=8, d_ff=14336, rope_theta=500000.0)
_QWEN3 = ModelConfig(vocab_size=151936, num_heads=32, head_width=128, qk_norm=True, norm_eps=1e-6, rope_theta=1000000.0)
_QWEN3_TINY = replace(_TINY, head_width=24, qk_norm=True, norm_eps=1e-6, rope_theta=1000000.0)
_MIXTRAL = replace(_LLAMA2_7B, num_kv_heads=8, d_ff=14336, rope_theta=1000000.0, num_experts=8)
_GPT_OSS = ModelConfig(
    vocab_size=201088,
    d_model=2880,
    num_layers=24,
    num_heads=64,
    num_kv_heads=8,
    head_width=64,
    d_ff=2880,
    norm_wide=True,
    qkv_bias=True,
    output_bias=True,
    window=128,
    window_pattern=2,
    sinks="learned",
    rope_theta=150000.0,
    rope_scaling=Yarn(32.0, rounded=False),
    act="quick_gelu",
    mlp_bias=True,
    gate_clamp=7.0,
    gate_offset=1.0,
    num_experts=32,
    top_k=4,
    router="topk_softmax",
    router_bias=True,
)
_GEMMA3_4B = ModelConfig(
    vocab_size=262208,
    d_model=2560,
    num_layers=34,
    num_heads=8,
    num_kv_heads=4,
    head_width=256,
    d_ff=10240,
    tie_embeddings=True,
    embed_scale=True,
    norm_eps=1e-6,
    norm_offset=1.0,
    norm_wide=True,
    sandwich_norm=True,
    qk_norm=True,
    attention_scale=256**-0.5,
    window=1024,
    window_pattern=6,
    rope_theta=1000000.0,
    local_rope_theta=10000.0,
    rope_scaling=Linear(8.0),
    act="gelu_tanh",
)

SIZES: dict[str, dict[str, ModelConfig]] = {
    "dense": {
        "tiny": _TINY,
        "tiny-geglu": replace(_TINY, act="gelu_tanh", tie_embeddings=True),
        "tiny-capped": replace(
            _TINY, attention_softcap=5.0, logit_softcap=4.0, window=7, window_pattern=(True, False), rope_fraction=0.5
        ),
        "tiny-sinks": replace(_TINY, sinks="fixed", rope_fraction=0.5, rope_interleaved=True, qkv_bias=True),
        "100m": ModelConfig(d_model=768, num_layers=16, num_heads=12, num_kv_heads=4, d_ff=2048),
    },
    "moe": {
        "tiny": _TINY_MOE,
        "tiny-grouped": replace(
            _TINY_MOE,
            router="sigmoid",
            num_groups=4,
            top_groups=2,
            selection_bias=True,
            routed_scale=2.5,
            shared_d_ff=48,
        ),
        "tiny-losses": replace(_TINY_MOE, act="relu_squared", balance_loss=0.01, z_loss=0.001),
        "tiny-capacity": replace(_TINY_MOE, capacity_factor=1.0, balance_loss=0.01),
        "tiny-jitter": replace(_TINY_MOE, jitter=0.2),
        "tiny-choice-jitter": replace(_TINY_MOE, choice_jitter=0.5),
        "demo": ModelConfig(d_model=128, num_layers=3, d_ff=128, num_experts=8),
        "100m": ModelConfig(d_model=512, num_layers=8, num_heads=8, num_kv_heads=4, d_ff=1024, num_experts=8),
    },
    "tinyllama": {
        "1.1b": ModelConfig(vocab_size=32000, d_model=2048, num_layers=22, num_heads=32, num_kv_heads=4, d_ff=5632)
    },
    "llama2": {"7b": _LLAMA2_7B},
    "llama3": {"tiny": replace(_TINY, rope_theta=500000.0), "8b": _LLAMA3_8B},
    "llama3.1": {
        "tiny": replace(_TINY, rope_theta=500000.0, rope_scaling=Llama3(8.0, original_length=64)),
        "8b": replace(_LLAMA3_8B, rope_scaling=Llama3(8.0)),
    },
    "qwen3": {
        "tiny": _QWEN3_TINY,
        "8b": replace(_QWEN3, d_model=4096, num_layers=36, num_kv_heads=8, d_ff=12288),
        "moe-tiny": replace(_QWEN3_TINY, d_ff=64, num_experts=8, top_k=3),
        "30b-a3b": replace(_QWEN3, d_model=2048, num_layers=48, num_kv_heads=4, d_ff=768, num_experts=128, top_k=8),
    },
    "mixtral": {"tiny": replace(_TINY_MOE, rope_theta=1000000.0), "8x7b": _MIXTRAL},
    "gpt-oss": {
        "tiny": replace(
            _GPT_OSS,
            vocab_size=256,
            d_model=64,
            num_heads=4,
            num_kv_heads=2,
            num_layers=2,
            head_width=24,
            d_ff=48,
            window=9,
            num_experts=8,
            rope_scaling=Yarn(32.0, original_length=64, rounded=False),
        ),
        "20b": _GPT_OSS,
    },
    "gemma3": {
        "tiny": replace(
            _GEMMA3_4B,
            vocab_size=256,
            d_model=64,
            num_heads=4,
            num_kv_heads=2,
            num_layers=3,
            head_width=24,
            d_ff=176,
            window=9,
            window_pattern=3,
            attention_scale=0.2,
        ),
        "4b": _GEMMA3_4B,
    },
}
"""Named shapes of each family. The byte-level ones have 256 tokens; `dataclasses.replace` gives others."""
