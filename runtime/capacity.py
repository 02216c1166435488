"""Capacity of experts on torch: who is dropped, padding among it, and that no gradient goes there.

T tokens, K experts a token, E experts. Nothing waits for the device, nor do shapes depend on values.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor


def moe_capacity(
    weights: Tensor, indices: Tensor, *, num_experts: int, factor: float, keep: str = "weight"
) -> tuple[Tensor, Tensor]:
    """weights [T, K] and indices i64 [T, K] with 0 and E where an expert has no room: it takes `ceil(T*K/E * factor)`
    tokens, those of largest weight or, with `keep` "position", the first."""
    room = math.ceil(Fraction(str(factor)) * indices.numel() / num_experts)
    flat = indices.flatten()
    if keep == "weight":
        first = weights.flatten().sort(descending=True, stable=True).indices
        by_expert, second = flat[first].sort(stable=True)
        order = first[second]
    else:
        by_expert, order = flat.sort(stable=True)
    # How many of the same expert come before each.
    before = torch.arange(flat.shape[0], device=flat.device) - torch.searchsorted(by_expert, by_expert)
    kept = torch.empty_like(flat, dtype=torch.bool)
    kept[order] = before < room
    kept = kept.view(indices.shape)
    return weights.where(kept, 0.0), indices.where(kept, num_experts)


def moe_capacity_grad(dweights: Tensor, indices: Tensor, *, num_experts: int) -> Tensor:
    """Gradient of `moe_capacity` for the weights [T, K]; `indices` are the new ones."""
    return dweights.where(indices < num_experts, 0.0)


def moe_drop_padding(weights: Tensor, indices: Tensor, real: Tensor, *, num_experts: int) -> tuple[Tensor, Tensor]:
    """weights [T, K] and indices i64 [T, K] with 0 and E for tokens that are not `real`, bool [T]."""
    padding = ~real[:, None]
    return weights.masked_fill(padding, 0.0), indices.masked_fill(padding, num_experts)
