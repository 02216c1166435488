"""A model of one's own: `mgraph compile examples/user_model.py:tiny --for train`.

A decoder with learned positions, and a loss of its own: cross entropy plus a penalty that keeps the normaliser of the
softmax near 1. Plain PyTorch; nothing here knows of mgraph.

Shapes: B batch, S sequence, N width, H heads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB, WIDTH, HEADS, LAYERS, MAX_LENGTH = 256, 64, 4, 2, 128
PENALTY = 1e-4


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.Parameter(torch.ones(WIDTH))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp_norm = nn.Parameter(torch.ones(WIDTH))
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, N] -> [B, S, N]."""
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, HEADS, width // HEADS).transpose(1, 2)
            for part in self.qkv(normalise(x, self.attention_norm)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        hidden: Tensor = x + self.down(F.gelu(self.up(normalise(x, self.mlp_norm))))
        return hidden


def normalise(x: Tensor, weight: Tensor) -> Tensor:
    """weight * x / sqrt(mean(x**2) + 1e-6)."""
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Decoder(nn.Module):
    """tokens i64[B, S], S <= MAX_LENGTH -> logits [B, S, V]; the head shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Parameter(torch.randn(MAX_LENGTH, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        nn.init.trunc_normal_(self.head.weight, std=0.02, a=-0.04, b=0.04)
        self.embed.weight = self.head.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens i64[B, S] -> logits [B, S, V]."""
        x: Tensor = self.embed(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def tiny() -> nn.Module:
    """The factory that the command line names."""
    return Decoder()


def inputs(B: Any, S: Any) -> dict[str, tuple[torch.dtype, tuple[Any, ...]]]:
    """Names, dtypes and shapes of what a step takes; B and S may have any value."""
    return {"tokens": (torch.int64, (B, S)), "labels": (torch.int64, (B, S))}


def loss(outputs: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Sum over targets of cross entropy + PENALTY * logsumexp(logits)**2, and the number of targets."""
    labels = batch["labels"]
    logits = outputs.float().flatten(0, 1)
    entropy = F.cross_entropy(logits, labels.flatten(), reduction="sum", ignore_index=-100)
    kept = labels.flatten() != -100
    normaliser = torch.where(kept, torch.logsumexp(logits, dim=-1), 0.0)
    return entropy + PENALTY * normaliser.pow(2).sum(), kept.sum()
