"""A mixture of experts with a router of its own: experts have directions, and tokens go to the nearest ones.

mgraph compile examples/custom_router.py:model -o build/cosine
python build/cosine/train.py --steps 20
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mgraph import models
from mgraph.models.config import ModelConfig
from mgraph.models.custom_router import use_router


class CosineRouter(nn.Module):
    """Weights are the squares of the cosines between a token and the directions of its experts, and sum to 1."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.directions = nn.Parameter(torch.empty(config.num_experts, config.d_model))
        nn.init.normal_(self.directions)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """tokens [T, N] -> weights f32[T, K], experts i64[T, K], and a loss f32[] that keeps directions apart."""
        directions = F.normalize(self.directions.float(), dim=-1)
        cosines = F.normalize(tokens.float(), dim=-1) @ directions.t()
        experts = cosines.abs().topk(self.top_k, dim=-1).indices
        weights = cosines.gather(1, experts).square() + 1e-6
        alike = (directions @ directions.t()).square().mean()
        return weights / weights.sum(-1, keepdim=True), experts, 0.01 * alike


def model() -> nn.Module:
    """The small mixture of the zoo, with this router in every layer."""
    return use_router(models.get("moe", "tiny"), CosineRouter)
