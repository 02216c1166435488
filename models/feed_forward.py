"""The feed-forward layer: gated (or squared ReLU), with clamp, offset and biases where asked for.

Shapes: B batch, S sequence, N model width, F feed-forward width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .config import ModelConfig
from .layers import output_std, projection


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": _gelu_tanh,
    "gelu": F.gelu,
    "quick_gelu": _quick_gelu,
    "relu_squared": _relu_squared,
}


def is_gated(config: ModelConfig) -> bool:
    """Whether there is a gate."""
    return config.act != "relu_squared"


def hidden_units(config: ModelConfig, up: Tensor, gate: Tensor | None) -> Tensor:
    """act(gate) * (up + offset), gate and up clamped before; act(up) where there is no gate."""
    act = ACTIVATIONS[config.act]
    if gate is None:
        return act(up)
    if config.gate_clamp:
        gate, up = gate.clamp(max=config.gate_clamp), up.clamp(-config.gate_clamp, config.gate_clamp)
    return act(gate) * (up + config.gate_offset if config.gate_offset else up)


class FeedForward(nn.Module):
    """y = down(hidden_units(up(x), gate(x)))."""

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__()
        self.config = config
        bias = config.mlp_bias
        self.gate = projection(config.d_model, width, config.init_std, bias=bias) if is_gated(config) else None
        self.up = projection(config.d_model, width, config.init_std, bias=bias)
        self.down = projection(width, config.d_model, output_std(config), bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, N] -> [B, S, N]."""
        gate = None if self.gate is None else self.gate(x)
        out: Tensor = self.down(hidden_units(self.config, self.up(x), gate))
        return out
