"""What several parts of a decoder use: linear layers with their initial weights, and the soft cap."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .config import ModelConfig


def projection(num_inputs: int, num_outputs: int, std: float, *, bias: bool = False) -> nn.Linear:
    """A linear layer whose weight is normal with deviation `std`; a bias begins at 0."""
    layer = nn.Linear(num_inputs, num_outputs, bias=bias)
    nn.init.normal_(layer.weight, std=std)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def output_std(config: ModelConfig) -> float:
    """Deviation of weights that write into the residual stream: keeps its variance independent of the depth."""
    return config.init_std / math.sqrt(2 * config.num_layers)


def softcap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), which lies between -cap and cap; x itself where cap is 0."""
    return torch.tanh(x / cap) * cap if cap else x
