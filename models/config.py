"""The shape of a decoder and the sizes that have names."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

__all__ = ["SIZES", "ModelConfig"]


@dataclass(frozen=True)
class ModelConfig:
    """Shape and options of a decoder-only transformer; `num_experts` = 0 means a dense one."""

    vocab_size: int = 256
    d_model: int = 64
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    d_ff: int = 176
    """Width of the gated layer; of one expert in a mixture."""
    act: str = "silu"
    """Activation of the gate: a key of `layers.ACTIVATIONS`."""
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    num_experts: int = 0
    top_k: int = 2
    """Experts a token goes to."""
    renormalize: bool = True
    """Divide the weights of the chosen experts by their sum."""
    init_std: float = 0.02

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.num_heads

    def __post_init__(self) -> None:
        if self.d_model % self.num_heads or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"d_model {self.d_model} must be a multiple of num_heads {self.num_heads}, "
                f"and that of num_kv_heads {self.num_kv_heads}"
            )
        if self.num_experts and not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"top_k {self.top_k} must lie in 1..{self.num_experts}, the number of experts")


_TINY = ModelConfig()
_TINY_MOE = ModelConfig(d_ff=64, num_experts=8)
_LLAMA2_7B = ModelConfig(
    vocab_size=32000, d_model=4096, num_layers=32, num_heads=32, num_kv_heads=32, d_ff=11008, norm_eps=1e-5
)

SIZES: dict[str, dict[str, ModelConfig]] = {
    "dense": {
        "tiny": _TINY,
        "tiny-geglu": dataclasses.replace(_TINY, act="gelu_tanh", tie_embeddings=True),
        "100m": ModelConfig(d_model=768, num_layers=16, num_heads=12, num_kv_heads=4, d_ff=2048),
        "tinyllama-1.1b": ModelConfig(
            vocab_size=32000, d_model=2048, num_layers=22, num_heads=32, num_kv_heads=4, d_ff=5632
        ),
        "llama2-7b": _LLAMA2_7B,
        "llama3-8b": dataclasses.replace(
            _LLAMA2_7B, vocab_size=128256, num_kv_heads=8, d_ff=14336, rope_theta=500000.0
        ),
    },
    "moe": {
        "tiny": _TINY_MOE,
        "demo": ModelConfig(d_model=128, num_layers=3, d_ff=128, num_experts=8),
        "100m": ModelConfig(d_model=512, num_layers=8, num_heads=8, num_kv_heads=4, d_ff=1024, num_experts=8),
        "mixtral-8x7b": dataclasses.replace(
            _LLAMA2_7B, num_kv_heads=8, d_ff=14336, rope_theta=1000000.0, num_experts=8
        ),
    },
}
"""Named shapes of each family. The byte-level ones have 256 tokens; `dataclasses.replace` gives others."""
