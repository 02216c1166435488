"""Rotary positions: pairs of dims of a head turn by an angle that grows with the position.

Shapes: B batch, S sequence, H heads, D head width, R rotated width (R <= D).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .config import Linear, Llama3, ModelConfig, Yarn


def frequencies(width: int, theta: float) -> Tensor:
    """theta**(-2 i / width) for i < width / 2: f32[width / 2], the angle per position of each pair."""
    exponents = torch.arange(0, width, 2, dtype=torch.int64).float() / width
    return 1.0 / theta**exponents


def llama3_scaled(freqs: Tensor, scaling: Llama3) -> Tensor:
    """The frequencies of `Llama3`: f / factor + blend * (f - f / factor), blend from 0 at `low` to 1 at `high`."""
    waves = scaling.original_length * freqs / (2 * math.pi)
    blend = ((waves - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    return (1 - blend) * freqs / scaling.factor + blend * freqs


def yarn_scaled(freqs: Tensor, theta: float, scaling: Yarn) -> Tensor:
    """The frequencies of `Yarn`: kept up to pair `first`, divided by the factor from `last`, a linear blend between."""

    def dim_of(turns: float) -> float:
        """The pair that turns so often in the original length."""
        return len(freqs) * math.log(scaling.original_length / (2 * math.pi * turns)) / math.log(theta)

    first, last = dim_of(scaling.fast), dim_of(scaling.slow)
    if scaling.rounded:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * len(freqs) - 1)
    ramp = (torch.arange(len(freqs), dtype=torch.float32) - first) / (last - first if last != first else 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return freqs / scaling.factor * (1 - kept) + freqs * kept


class RotaryEmbedding(nn.Module):
    """Cosine and sine of position * frequency, each frequency twice: for both dims of a pair.

    `local` gives the angles of windowed layers (`config.local_rope_theta`), never scaled.
    """

    inv_freq: Tensor

    def __init__(self, config: ModelConfig, *, local: bool = False) -> None:
        super().__init__()
        theta = config.local_rope_theta if local else config.rope_theta
        scaling = None if local else config.rope_scaling
        freqs = frequencies(config.rotary_dim, theta)
        self.interleaved = config.rope_interleaved
        self.magnitude = 1.0
        match scaling:
            case Linear(factor):
                freqs = freqs / factor
            case Llama3():
                freqs = llama3_scaled(freqs, scaling)
            case Yarn(factor):
                freqs = yarn_scaled(freqs, theta, scaling)
                self.magnitude = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        self.register_buffer("inv_freq", freqs, persistent=False)

    def forward(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """position_ids i64[..., S] -> cos, sin [..., 1, S, R] (the 1 stands for heads) of `dtype`."""
        angles = position_ids.unsqueeze(-1).float() * self.inv_freq.float()
        angles = angles.repeat_interleave(2, dim=-1) if self.interleaved else torch.cat((angles, angles), dim=-1)
        cos, sin = angles.unsqueeze(-3).cos(), angles.unsqueeze(-3).sin()
        if self.magnitude != 1.0:
            cos, sin = cos * self.magnitude, sin * self.magnitude
        return cos.to(dtype), sin.to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Turn pairs among the first R dims of x [B, H, S, D] by their angles: (a, b) -> (a cos - b sin, b cos + a sin).

    Pairs are dims (i, i + R/2), or (2i, 2i + 1) where `interleaved`.
    """
    width = cos.shape[-1]
    if width < x.shape[-1]:
        turned = rotate(x[..., :width], cos, sin, interleaved=interleaved)
        return torch.cat((turned, x[..., width:]), dim=-1)
    if interleaved:
        across = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    else:
        across = torch.cat((-x[..., width // 2 :], x[..., : width // 2]), dim=-1)
    return x * cos + across * sin
