"""RMS norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .config import ModelConfig


class RMSNorm(nn.Module):
    """y = (offset + weight) * x / sqrt(mean(x**2) + eps), normalised in float32.

    Rounded to the dtype of x before the product with the weight, or after it (`config.norm_wide`).
    """

    def __init__(self, width: int, config: ModelConfig) -> None:
        super().__init__()
        self.eps, self.offset, self.wide = config.norm_eps, config.norm_offset, config.norm_wide
        self.weight = nn.Parameter(torch.empty(width))
        nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., N] -> [..., N], same dtype."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        weight = self.weight.float() if self.wide else self.weight
        if self.offset:
            weight = weight + self.offset
        return (weight * normed).to(x.dtype) if self.wide else weight * normed.to(x.dtype)
