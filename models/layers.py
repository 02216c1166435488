"""Layers the decoders share: RMS norm, rotary embedding, grouped-query attention, gated MLP.

Shapes: B batch, S sequence, N model width, H heads, G key/value heads, D head width, F gated width.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .config import ModelConfig


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu_tanh": _gelu_tanh, "gelu": F.gelu}


def projection(num_inputs: int, num_outputs: int, std: float) -> nn.Linear:
    """A linear layer without bias whose weight is normal with deviation `std`."""
    layer = nn.Linear(num_inputs, num_outputs, bias=False)
    nn.init.normal_(layer.weight, std=std)
    return layer


def output_std(config: ModelConfig) -> float:
    """Deviation of weights that write into the residual stream: keeps its variance independent of the depth."""
    return config.init_std / math.sqrt(2 * config.num_layers)


class RMSNorm(nn.Module):
    """y = weight * x / sqrt(mean(x**2) + eps), normalised in float32 and rounded before the product."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., N] -> [..., N], same dtype."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class RotaryEmbedding(nn.Module):
    """Angles position * theta**(-2 i / D), i < D / 2, as cosines and sines, repeated for both halves of a head."""

    inv_freq: Tensor

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        self.register_buffer("inv_freq", 1.0 / theta**exponents, persistent=False)

    def forward(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """position_ids i64[..., S] -> cos, sin [..., 1, S, D] (the 1 stands for heads) of `dtype`."""
        angles = position_ids.unsqueeze(-1).float() * self.inv_freq.float()
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(-3)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + D/2]) of x [B, H, S, D] by its angle."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions; heads h * H/G .. (h+1) * H/G - 1 share key head h."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, head_dim = config.d_model, config.head_dim
        self.head_dim = head_dim
        self.q = projection(width, config.num_heads * head_dim, config.init_std)
        self.k = projection(width, config.num_kv_heads * head_dim, config.init_std)
        self.v = projection(width, config.num_kv_heads * head_dim, config.init_std)
        self.o = projection(config.num_heads * head_dim, width, output_std(config))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, S, N], cos and sin of `RotaryEmbedding` -> [B, S, N]."""
        heads = (*x.shape[:2], -1, self.head_dim)
        q = rotate(self.q(x).view(heads).transpose(1, 2), cos, sin)
        k = rotate(self.k(x).view(heads).transpose(1, 2), cos, sin)
        v = self.v(x).view(heads).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return out


class GatedMLP(nn.Module):
    """y = down(act(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = projection(config.d_model, config.d_ff, config.init_std)
        self.up = projection(config.d_model, config.d_ff, config.init_std)
        self.down = projection(config.d_ff, config.d_model, output_std(config))
        self.act = ACTIVATIONS[config.act]

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, N] -> [B, S, N]."""
        out: Tensor = self.down(self.act(self.gate(x)) * self.up(x))
        return out


class Decoder(nn.Module):
    """Embedding, blocks of (norm, attention) and (norm, feed-forward) with residuals, norm, output head.

    `feed_forward` makes the second half of a block from the configuration: a gated MLP or a mixture of experts.
    """

    def __init__(self, config: ModelConfig, feed_forward: Callable[[ModelConfig], nn.Module]) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        nn.init.normal_(self.embed.weight, std=config.init_std)
        self.rotary = RotaryEmbedding(config.head_dim, config.rope_theta)
        self.layers = nn.ModuleList(Block(config, feed_forward(config)) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.head = projection(config.d_model, config.vocab_size, config.init_std)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """tokens i64[B, S], optional position_ids i64[B, S] (default 0 .. S-1) -> logits [B, S, V]."""
        x: Tensor = self.embed(tokens)
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1], device=tokens.device)
        cos, sin = self.rotary(position_ids, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: ModelConfig, feed_forward: nn.Module) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.d_model, config.norm_eps)
        self.attn = Attention(config)
        self.ffn_norm = RMSNorm(config.d_model, config.norm_eps)
        self.ffn = feed_forward

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, S, N] -> [B, S, N]."""
        x = x + self.attn(self.attn_norm(x), cos, sin)
        out: Tensor = x + self.ffn(self.ffn_norm(x))
        return out
