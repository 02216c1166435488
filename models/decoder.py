"""The decoder: embedding, layers of attention and feed-forward or experts, norm, output head.

Shapes: B batch, S sequence, N model width, V vocabulary.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .attention import Attention, visible
from .config import ModelConfig
from .experts import Experts
from .feed_forward import FeedForward
from .layers import projection, softcap
from .norm import RMSNorm
from .rope import RotaryEmbedding


class Output(NamedTuple):
    """What experts with a router loss give: logits [B, S, V], and the loss f32[] to add to the mean one."""

    logits: Tensor
    aux_loss: Tensor


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + feed_forward(norm(x)); `sandwich_norm` adds norms behind both."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.d_model, config)
        self.attn = Attention(config)
        self.ffn_norm = RMSNorm(config.d_model, config)
        self.ffn = Experts(config) if config.num_experts else FeedForward(config, config.d_ff)
        self.attn_post_norm = RMSNorm(config.d_model, config) if config.sandwich_norm else nn.Identity()
        self.ffn_post_norm = RMSNorm(config.d_model, config) if config.sandwich_norm else nn.Identity()

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, real: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """x [B, S, N] -> [B, S, N], and the router's loss f32[] if it has one. Experts get what is `real`, bool[B, S],
        or everything."""
        x = x + self.attn_post_norm(self.attn(self.attn_norm(x), cos, sin, mask))
        normed = self.ffn_norm(x)
        given = (normed,) if real is None else (normed, real)
        mixed, loss = self.ffn(*given) if isinstance(self.ffn, Experts) else (self.ffn(normed), None)
        return x + self.ffn_post_norm(mixed), loss


class Decoder(nn.Module):
    """A decoder-only transformer, dense or with experts, as its configuration says."""

    embed_scale: Tensor | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        nn.init.normal_(self.embed.weight, std=config.init_std)
        scale = torch.tensor(math.sqrt(config.d_model)) if config.embed_scale else None
        self.register_buffer("embed_scale", scale, persistent=False)
        self.rotary = RotaryEmbedding(config)
        self.local_rotary = RotaryEmbedding(config, local=True) if config.local_rope_theta else None
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.d_model, config)
        self.head = projection(config.d_model, config.vocab_size, config.init_std)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight

    def forward(
        self, tokens: Tensor, position_ids: Tensor | None = None, segment_ids: Tensor | None = None
    ) -> Tensor | Output:
        """tokens i64[B, S] -> logits [B, S, V], or `Output` where routers have a loss.

        position_ids i64[B, S] default to 0 .. S-1. Tokens of different segment_ids i64[B, S] do not see each other:
        they are documents that share a row. Segment 0 is what fills a row up: no expert gets it.
        """
        x: Tensor = self.embed(tokens)
        if self.embed_scale is not None:
            x = x * self.embed_scale.to(x.dtype)
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1], device=tokens.device)
        angles = {0: self.rotary(position_ids, x.dtype)}
        masks = {}
        for window in sorted(set(self.config.windows)):
            rotary = self.local_rotary if window else None
            angles[window] = angles[0] if rotary is None else rotary(position_ids, x.dtype)
            masks[window] = self.mask(tokens, window, segment_ids)

        real = segment_ids != 0 if segment_ids is not None and self.config.num_experts else None
        losses = []
        for layer, window in zip(self.layers, self.config.windows, strict=True):
            x, loss = layer(x, *angles[window], masks[window], real)
            losses += [] if loss is None else [loss]
        logits = softcap(self.head(self.norm(x)), self.config.logit_softcap)
        return Output(logits, torch.stack(losses).sum()) if losses else logits

    def mask(self, tokens: Tensor, window: int, segment_ids: Tensor | None) -> Tensor | None:
        """What layers of a window see; None where causal says it all to the fused attention."""
        written_out = self.config.sinks != "none" or self.config.attention_softcap
        if not window and segment_ids is None and not written_out:
            return None
        return visible(tokens.shape[1], window, segment_ids, tokens.device)
