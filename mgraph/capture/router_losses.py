"""Losses of routers in transformers models (`output_router_logits`), in ops that can be traced.

The classes share a function for them, which counts by histograms and divides by numbers that are quotients of sizes. In
its place stands the same loss (Fedus et al. 2021, eq. 4 to 6), of L routers with T tokens each that choose K of E:

    E * sum over e of f_e P_e,   f_e = (choices of e in all layers) / (L T),   P_e = mean probability of e over all

made of sums and means over tokens, so that `joint-losses` can take them over the tokens of all ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from mgraph.capture.packed import is_transformers
from mgraph.errors import ModelError

NAME = "load_balancing_loss_func"


def balance_loss(gate_logits: Any, num_experts: int | None, top_k: int) -> Tensor:
    """The loss f32[] of routers that gave `gate_logits`, L tensors [T, E], and take the `top_k` best of each."""
    counts, means = [], []
    for logits in gate_logits:
        probabilities = logits.softmax(-1)
        chosen = probabilities.topk(top_k, dim=-1).indices.flatten()
        probabilities = probabilities.float()
        ones = torch.ones_like(chosen, dtype=torch.float32)
        counts.append(torch.zeros_like(probabilities[0]).index_add(0, chosen, ones))
        means.append(probabilities.mean(0))
    chosen_of_each = torch.stack(counts).sum(0)
    share = top_k * chosen_of_each / chosen_of_each.sum()
    return (num_experts or len(share)) * (share * torch.stack(means).mean(0)).sum()


@contextmanager
def traceable(model: nn.Module) -> Iterator[None]:
    """Within, a transformers model whose class uses the shared function has its losses from `balance_loss`."""
    module = sys.modules.get(type(model).__module__)
    own = getattr(module, NAME, None) if is_transformers(model) else None
    if own is None:
        yield
        return
    with patch.object(module, NAME, _instead_of(own)):
        yield


def _instead_of(own: Callable[..., Any]) -> Callable[..., Any]:
    """`balance_loss` for the calls that it is defined for; the class's own function for others."""

    def loss(gate_logits: Any, num_experts: int | None = None, top_k: int = 2, attention_mask: Any = None) -> Any:
        if attention_mask is not None or not isinstance(gate_logits, tuple):
            return own(gate_logits, num_experts, top_k, attention_mask)
        return balance_loss(gate_logits, num_experts, top_k)

    return loss


def weight_of(model: nn.Module, where: str) -> float:
    """What a model's own loss is multiplied by before it is added to the mean loss: for transformers classes
    `router_aux_loss_coef`, 1 for others. Raises ModelError for a class of transformers that has none."""
    if not is_transformers(model):
        return 1.0
    config: Any = model.config
    found = getattr(model, "router_aux_loss_coef", getattr(config.get_text_config(), "router_aux_loss_coef", None))
    if found is None:
        hint = "set output_router_logits to false in config.json, or define loss(outputs, batch) in a file of your own"
        raise ModelError(f"{type(model).__name__} gives a loss of its own, and no router_aux_loss_coef", where, hint)
    return float(found)
