"""Causal grouped-query attention with rotary positions, and the masks that say which keys a query sees.

Shapes: B batch, S sequence, N model width, H heads, G key/value heads, D head width, R rotated width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .config import ModelConfig
from .layers import output_std, projection, softcap
from .norm import RMSNorm
from .rope import rotate


def visible(length: int, window: int, segment_ids: Tensor | None, device: torch.device) -> Tensor:
    """bool [S, S] or [B, 1, S, S]: whether query q (row) sees key k (column).

    It does where k <= q, q - k < window (0: any distance), and both lie in one document: their segment_ids i64[B, S]
    are equal.
    """
    queries = torch.arange(length, device=device).unsqueeze(1)
    keys = torch.arange(length, device=device)
    seen = keys <= queries
    if window:
        seen = seen & (keys > queries - window)
    if segment_ids is not None:
        seen = seen & (segment_ids.unsqueeze(1).unsqueeze(3) == segment_ids.unsqueeze(1).unsqueeze(2))
    return seen


class Attention(nn.Module):
    """softmax(q k^T * scale) v over the keys that a query sees; heads h * H/G .. (h + 1) * H/G - 1 share key head h.

    With sinks, each head has one more key of score s and no value: p_k = exp(a_k) / (exp(s) + sum_j exp(a_j)).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, head_dim = config.d_model, config.head_dim
        self.head_dim = head_dim
        self.scale = config.attention_scale or head_dim**-0.5
        self.interleaved = config.rope_interleaved
        self.softcap = config.attention_softcap
        self.num_heads, self.groups = config.num_heads, config.num_heads // config.num_kv_heads
        self.q = projection(width, config.num_heads * head_dim, config.init_std, bias=config.qkv_bias)
        self.k = projection(width, config.num_kv_heads * head_dim, config.init_std, bias=config.qkv_bias)
        self.v = projection(width, config.num_kv_heads * head_dim, config.init_std, bias=config.qkv_bias)
        self.o = projection(config.num_heads * head_dim, width, output_std(config), bias=config.output_bias)
        self.q_norm = RMSNorm(head_dim, config) if config.qk_norm else None
        self.k_norm = RMSNorm(head_dim, config) if config.qk_norm else None
        self.has_sinks = config.sinks != "none"
        self.sinks = nn.Parameter(torch.empty(config.num_heads)) if config.sinks == "learned" else None
        if self.sinks is not None:
            nn.init.normal_(self.sinks, std=config.init_std)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        """x [B, S, N], cos and sin of `RotaryEmbedding`, mask of `visible` (None: causal) -> [B, S, N]."""
        heads = (*x.shape[:2], -1, self.head_dim)
        q, k, v = self.q(x).view(heads), self.k(x).view(heads), self.v(x).view(heads)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q = rotate(q.transpose(1, 2), cos, sin, interleaved=self.interleaved)
        k = rotate(k.transpose(1, 2), cos, sin, interleaved=self.interleaved)
        v = v.transpose(1, 2)
        if self.has_sinks or self.softcap:
            assert mask is not None, "attention with sinks or capped scores takes a mask"
            mixed = self.written_out(q, k, v, mask)
        else:
            mixed = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=True
            )
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return out

    def written_out(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """The same, step by step: q [B, H, S, D], k and v [B, G, S, D] -> [B, H, S, D]. The softmax is in float32."""
        k, v = k.repeat_interleave(self.groups, dim=1), v.repeat_interleave(self.groups, dim=1)
        scores = torch.matmul(q, k.transpose(2, 3)) * self.scale
        scores = softcap(scores, self.softcap).float().masked_fill(~mask, float("-inf"))
        if self.has_sinks:
            sinks = scores.new_zeros(self.num_heads) if self.sinks is None else self.sinks.float()
            column = sinks.view(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], -1)
            weights = torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        return torch.matmul(weights.to(v.dtype), v)
