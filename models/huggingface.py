"""Decoders in the form that transformers has for them: the configuration of the class that computes the same, and the
tensors of its checkpoints.

Shapes: E experts, N model width, F width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from .config import Linear, Llama3, ModelConfig, RopeScaling, Yarn

__all__ = ["checkpoint", "configuration"]

_COMMON = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
}
"""What every class has, by our name and by theirs."""

_ANY = frozenset({*_COMMON, "head_width", "rope_theta"})
_TRAINING = frozenset({"jitter", "choice_jitter", "balance_loss", "z_loss"})
"""Options that change no logits: a class is the same with any of them, and is not told."""

_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh", "gelu": "gelu"}


@dataclass(frozen=True)
class _Family:
    """A class of transformers: which options it always has, which it has settings for, and those settings.

    Every other option must be at its default. `settings` gives None for values that the class cannot have.
    """

    model_type: str
    architecture: str
    always: Mapping[str, Any] = field(default_factory=dict)
    free: frozenset[str] = frozenset()
    settings: Callable[[ModelConfig], dict[str, Any] | None] = lambda config: {"rope_parameters": _rope(config)}

    def holds(self, config: ModelConfig) -> bool:
        """Whether the options lie within what the class can be."""
        expected = {item.name: self.always.get(item.name, item.default) for item in fields(ModelConfig)}
        return all(getattr(config, name) == value for name, value in expected.items() if name not in _ANY | self.free)


def _rope(config: ModelConfig, *, local: bool = False) -> dict[str, Any]:
    """The rotary settings; `local`: those of windowed layers that have their own."""
    if local and config.local_rope_theta:
        return {"rope_type": "default", "rope_theta": config.local_rope_theta}
    scaling: RopeScaling | None = config.rope_scaling
    own: dict[str, Any]
    match scaling:
        case None:
            own = {"rope_type": "default"}
        case Linear(factor):
            own = {"rope_type": "linear", "factor": factor}
        case Llama3():
            own = {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low,
                "high_freq_factor": scaling.high,
                "original_max_position_embeddings": scaling.original_length,
            }
        case Yarn():
            own = {
                "rope_type": "yarn",
                "factor": scaling.factor,
                "beta_fast": scaling.fast,
                "beta_slow": scaling.slow,
                "truncate": scaling.rounded,
                "original_max_position_embeddings": scaling.original_length,
            }
    return {**own, "rope_theta": config.rope_theta}


def _llama(config: ModelConfig) -> dict[str, Any] | None:
    if config.qkv_bias != config.output_bias or config.act not in _ACTIVATIONS:
        return None
    return {
        "rope_parameters": _rope(config),
        "hidden_act": _ACTIVATIONS[config.act],
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
    }


def _qwen3_moe(config: ModelConfig) -> dict[str, Any]:
    return {
        "rope_parameters": _rope(config),
        "moe_intermediate_size": config.d_ff,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.top_k,
        "norm_topk_prob": config.renormalize,
    }


def _mixtral(config: ModelConfig) -> dict[str, Any]:
    return {
        "rope_parameters": _rope(config),
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.top_k,
    }


def _windows(config: ModelConfig) -> dict[str, Any]:
    kinds = ["sliding_attention" if window else "full_attention" for window in config.windows]
    return {"layer_types": kinds, **({"sliding_window": config.window} if config.window else {})}


def _gpt_oss(config: ModelConfig) -> dict[str, Any]:
    return {**_mixtral(config), **_windows(config)}


def _gemma2(config: ModelConfig) -> dict[str, Any] | None:
    """The scale of the scores is the root of a whole number in these classes."""
    scalar = (config.attention_scale or config.head_dim**-0.5) ** -2
    if abs(scalar - round(scalar)) > 1e-6 * scalar:
        return None
    return {
        "rope_parameters": _rope(config),
        "query_pre_attn_scalar": round(scalar),
        "attn_logit_softcapping": config.attention_softcap or None,
        "final_logit_softcapping": config.logit_softcap or None,
        **_windows(config),
    }


def _gemma3(config: ModelConfig) -> dict[str, Any] | None:
    settings = _gemma2(config)
    if settings is None:
        return None
    rope = {"full_attention": _rope(config), "sliding_attention": _rope(config, local=True)}
    return {**settings, "rope_parameters": rope}


_QWEN3 = {"qk_norm": True}
_GPT_OSS = {
    "norm_wide": True,
    "qkv_bias": True,
    "output_bias": True,
    "sinks": "learned",
    "act": "quick_gelu",
    "mlp_bias": True,
    "gate_clamp": 7.0,
    "gate_offset": 1.0,
    "router": "topk_softmax",
    "router_bias": True,
}
_GEMMA2 = {"embed_scale": True, "norm_offset": 1.0, "norm_wide": True, "sandwich_norm": True, "act": "gelu_tanh"}
_EXPERTS = frozenset({"num_experts", "top_k"}) | _TRAINING
_WINDOWED = frozenset({"window", "window_pattern"})
_GEMMA = _WINDOWED | {"attention_scale", "logit_softcap"}

_DENSE = (
    _Family(
        "llama",
        "LlamaForCausalLM",
        free=frozenset({"act", "qkv_bias", "output_bias", "mlp_bias", "rope_scaling"}),
        settings=_llama,
    ),
    _Family("qwen3", "Qwen3ForCausalLM", _QWEN3, frozenset({"rope_scaling"})),
    _Family("gemma2", "Gemma2ForCausalLM", _GEMMA2, _GEMMA | {"attention_softcap"}, _gemma2),
    _Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        {**_GEMMA2, "qk_norm": True},
        _GEMMA | {"local_rope_theta", "rope_scaling"},
        _gemma3,
    ),
)
_SPARSE = (
    _Family("mixtral", "MixtralForCausalLM", {}, _EXPERTS | {"rope_scaling"}, _mixtral),
    _Family("qwen3_moe", "Qwen3MoeForCausalLM", _QWEN3, _EXPERTS | {"renormalize", "rope_scaling"}, _qwen3_moe),
    _Family("gpt_oss", "GptOssForCausalLM", _GPT_OSS, _EXPERTS | _WINDOWED | {"rope_scaling"}, _gpt_oss),
)


def configuration(config: ModelConfig) -> dict[str, Any] | None:
    """The config.json of the transformers class that computes what this decoder does; None where there is none.

    The longest sequence, which a decoder has no bound of, is said where the frequencies are made for one; special
    tokens are not.
    """
    for family in _SPARSE if config.num_experts else _DENSE:
        settings = family.settings(config) if family.holds(config) else None
        if settings is not None:
            common = {theirs: getattr(config, ours) for ours, theirs in _COMMON.items()}
            names = {"architectures": [family.architecture], "model_type": family.model_type}
            scaling = config.rope_scaling
            longest = int(scaling.factor * scaling.original_length) if isinstance(scaling, Yarn) else None
            return {**names, **common, **settings, **({"max_position_embeddings": longest} if longest else {})}
    return None


_TOP = {"embed": "model.embed_tokens", "layers": "model.layers", "norm": "model.norm", "head": "lm_head"}
_WITHIN = {
    "attn_norm": "input_layernorm",
    "attn_post_norm": "post_attention_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
    "attn": "self_attn",
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "o": "o_proj",
    "ffn": "mlp",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
}


def checkpoint(config: ModelConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a transformers checkpoint, given those of the decoder's `state_dict`.

    They are views, and concatenations where transformers has one tensor for several. A tied head is not among them.
    Where no class equals the decoder, the tensors keep their names.
    """
    weights = {name: t for name, t in weights.items() if not (config.tie_embeddings and name == "head.weight")}
    settings = configuration(config)
    if settings is None:
        return weights
    if not config.num_experts:
        return {_name(name, config): tensor for name, tensor in weights.items()}
    tensors: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        layer, found, part = name.partition(".ffn.")
        if not found:
            tensors[_name(name, config)] = tensor
        elif part == "gate.weight":  # once a layer: the others are taken with it
            own = {rest: weights[f"{layer}.ffn.{rest}"] for rest in _parts(config)}
            tensors |= {
                f"{_name(layer, config)}.{rest}": made for rest, made in _LAYERS[settings["model_type"]](own).items()
            }
    return tensors


def _name(name: str, config: ModelConfig) -> str:
    """Their name of a parameter, or of a layer."""
    top, *rest = name.split(".")
    ffn_norm = "pre_feedforward_layernorm" if config.sandwich_norm else "post_attention_layernorm"
    within = {**_WITHIN, "ffn_norm": ffn_norm}
    return ".".join([_TOP[top], *(within.get(part, part) for part in rest)])


def _parts(config: ModelConfig) -> list[str]:
    """The parameters of a layer of experts."""
    biases = [f"{part}.bias" for part in ("gate", "up", "down")] if config.mlp_bias else []
    router = ["router.proj.weight", *(["router.proj.bias"] if config.router_bias else [])]
    return [*router, "gate.weight", "up.weight", "down.weight", *biases]


def _one_by_one(given: Mapping[str, Tensor], prefix: str, names: Mapping[str, str]) -> dict[str, Tensor]:
    """A tensor for every expert: [E, in, out] -> E times [out, in]. `names` are theirs, by ours."""
    tensors = {f"{prefix}.gate.weight": given["router.proj.weight"]}
    for ours, theirs in names.items():
        for expert, weight in enumerate(given[f"{ours}.weight"].transpose(1, 2).unbind(0)):
            tensors[f"{prefix}.experts.{expert}.{theirs}.weight"] = weight
    return tensors


def _qwen3_experts(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return _one_by_one(given, "mlp", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"})


def _mixtral_experts(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return _one_by_one(given, "block_sparse_moe", {"gate": "w1", "up": "w3", "down": "w2"})


def _gpt_oss_experts(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All experts in one: columns of gate and up by turns, [E, N, 2 F]; biases [E, 2 F]."""
    tensors = {}
    for kind, suffix in (("weight", ""), ("bias", "_bias")):
        tensors[f"mlp.router.{kind}"] = given[f"router.proj.{kind}"]
        both = torch.stack((given[f"gate.{kind}"], given[f"up.{kind}"]), -1)
        tensors[f"mlp.experts.gate_up_proj{suffix}"] = both.flatten(-2)
        tensors[f"mlp.experts.down_proj{suffix}"] = given[f"down.{kind}"]
    return tensors


_LAYERS = {"mixtral": _mixtral_experts, "qwen3_moe": _qwen3_experts, "gpt_oss": _gpt_oss_experts}
