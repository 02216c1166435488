"""Experts of transformers models, through the registry that transformers has for their implementations.

The classes' own forward loops over the experts that were hit, which cannot be traced; the implementation here is one
that can: rows sorted by expert, grouped products, a weighted sum in the dtype that the router's weights ask for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mgraph.models.grouped import grouped_linear

NAME = "mgraph"


def register() -> str:
    """Make the implementation known to transformers; the name to ask for."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS[NAME] = experts_forward
    return NAME


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """hidden_states [T, N], top_k_index i64[T, K], top_k_weights [T, K] -> [T, N]. `self` is the experts' module."""
    top_k = top_k_index.shape[1]
    by_expert, order = torch.sort(top_k_index.flatten(), stable=True)
    expert_ids = torch.arange(self.num_experts, device=hidden_states.device)
    ends = torch.searchsorted(by_expert, expert_ids, right=True, out_int32=True)

    def linear(rows: Tensor, name: str) -> Tensor:
        weight = getattr(self, name)
        out: Tensor = grouped_linear(rows, weight if self.is_transposed else weight.transpose(1, 2), ends)
        return out + getattr(self, f"{name}_bias")[by_expert] if self.has_bias else out

    rows = hidden_states[order // top_k].to(self.down_proj.dtype)
    first = linear(rows, "gate_up_proj" if self.has_gate else "up_proj")
    hidden = self._apply_gate(first) if self.has_gate else self.act_fn(first)
    rows = linear(hidden, "down_proj")
    if getattr(self, "has_post_expert_norm", False):
        rows = self.post_expert_norm(rows)

    rows = rows[torch.argsort(order)].view(-1, top_k, rows.shape[1])
    mixed = (rows * top_k_weights.unsqueeze(-1)).sum(1)
    return mixed.to(hidden_states.dtype)
