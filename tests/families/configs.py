"""Tiny configurations of every transformers family, with all options of the family on, and their eager models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
# Token ids of the published vocabularies lie outside a vocabulary of 256.
_TOKENS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}


def _llama(**changes: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**{**_COMMON, **_TOKENS, **changes})


def _llama3() -> Any:
    """Llama-3's frequencies, biases everywhere, a tied head."""
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    return _llama(rope_parameters=scaling, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)


def _qwen3() -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**{**_COMMON, **_TOKENS, "tie_word_embeddings": True})


def _qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig

    sizes = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
    return Qwen3MoeConfig(**{**_COMMON, **_TOKENS, **sizes})


def _mixtral() -> Any:
    from transformers import MixtralConfig

    sizes = {"intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    return MixtralConfig(**{**_COMMON, **_TOKENS, **sizes})


def _gpt_oss() -> Any:
    """Sinks, biases, sliding and full layers by turns, YaRN."""
    from transformers import GptOssConfig

    scaling = {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    }
    sizes = {"intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
    return GptOssConfig(**{**_COMMON, **_TOKENS, **sizes, "rope_parameters": scaling})


def _deepseek_v3() -> Any:
    """Latent attention with YaRN, groups of experts, biases that only choose, shared experts."""
    from transformers import DeepseekV3Config

    scaling = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 64,
    }
    attention = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
    experts = {
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "n_shared_experts": 1,
        "first_k_dense_replace": 0,
    }
    sizes = {**_COMMON, **attention, **experts, "num_key_value_heads": 4, "head_dim": 8}
    return DeepseekV3Config(**{**sizes, **_TOKENS, "rope_parameters": scaling})


def _gemma3() -> Any:
    """Five sliding layers, then a full one, each kind with its own frequencies."""
    from transformers import Gemma3TextConfig

    changes = {
        "pad_token_id": 0,
        "num_hidden_layers": 6,
        "sliding_window": 8,
        "query_pre_attn_scalar": 24,
        "tie_word_embeddings": True,
    }
    return Gemma3TextConfig(**{**_COMMON, **_TOKENS, **changes})


def _gpt2() -> Any:
    """Learned positions, a tied head, dropout of 0.1 in three places."""
    from transformers import GPT2Config

    sizes: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256, "n_positions": 512}
    return GPT2Config(**{**sizes, "bos_token_id": 1, "eos_token_id": 2})


def _bert() -> Any:
    """Both directions, token types, a masked-token head, dropout of 0.1."""
    from transformers import BertConfig

    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return BertConfig(**sizes, vocab_size=256, max_position_embeddings=512, pad_token_id=0)


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "llama3": _llama3,
    "qwen3": _qwen3,
    "qwen3-moe": _qwen3_moe,
    "mixtral": _mixtral,
    "gpt-oss": _gpt_oss,
    "deepseek-v3": _deepseek_v3,
    "gemma3": _gemma3,
    "gpt2": _gpt2,
    "bert": _bert,
}
"""Family to a function that makes its configuration."""

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "llama3": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3-moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "deepseek-v3": "DeepseekV3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "bert": "BertForMaskedLM",
}
"""Family to the transformers class that its configuration names."""


def write_config(name: str, directory: Path, **changes: Any) -> str:
    """Write `directory/config.json` of a family, and return what `mgraph compile` takes: `hf:directory/config.json`.

    `changes` are fields of the configuration.
    """
    directory.mkdir(parents=True, exist_ok=True)
    settings = {**CONFIGS[name]().to_dict(), "architectures": [ARCHITECTURES[name]], **changes}
    path = directory / "config.json"
    path.write_text(json.dumps(settings, indent=1, default=str))
    return f"hf:{path}"


def eager(name: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """The unmodified class of a family, with random weights of `dtype`, in training mode."""
    import transformers

    config = CONFIGS[name]()
    for field, value in {"use_cache": False, **changes}.items():
        setattr(config, field, value)
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model: nn.Module = getattr(transformers, ARCHITECTURES[name])(config)
    finally:
        torch.set_default_dtype(before)
    return model.train()
