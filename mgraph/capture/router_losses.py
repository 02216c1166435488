"""Losses of routers in transformers models (`output_router_logits`), in ops that can be traced.

The classes share a function for them, which counts by histograms and divides by numbers that are quotients of sizes. In
its place stands the same loss (Fedus et al. 2021, eq. 4 to 6), of L routers with T tokens each that choose K of E:

    E * sum over e of f_e P_e,   f_e = (choices of e in all layers) / (L T),   P_e = mean probability of e over all

made of sums over tokens, so that `joint-losses` can take them over the tokens of all ranks. Of rows that hold several
documents, what fills them up is not among the tokens.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from mgraph.capture.packed import is_transformers
from mgraph.errors import ModelError
from mgraph.models.router import choices_of_each, mean_of

NAME = "load_balancing_loss_func"
PARAMETERS = ["gate_logits", "num_experts", "top_k", "attention_mask"]
WEIGHTS = ("router_aux_loss_coef", "aux_loss_coef")
"""What classes, or their configurations, call the factor of such a loss."""


def balance_loss(gate_logits: tuple[Tensor, ...], num_experts: int, top_k: int, real: Tensor | None = None) -> Tensor:
    """The loss f32[] of routers that gave `gate_logits`, L tensors [T, E], and take the `top_k` best of each; of tokens
    that are `real`, bool[T], where that is given."""
    counts, means = [], []
    for logits in gate_logits:
        probabilities = logits.softmax(-1)
        experts = probabilities.topk(top_k, dim=-1).indices
        probabilities = probabilities.float()
        counts.append(choices_of_each(probabilities, experts, real))
        means.append(mean_of(probabilities, real))
    chosen_of_each = torch.stack(counts).sum(0)
    total = chosen_of_each.sum()
    share = top_k * chosen_of_each / (total if real is None else total.clamp(min=1))
    return num_experts * (share * torch.stack(means).mean(0)).sum()


@contextmanager
def traceable(model: nn.Module, real: Tensor | None) -> Iterator[None]:
    """Within, transformers classes in a model that use the shared function have their losses from `balance_loss`, of
    tokens that are `real`, bool[B, S], where that is given."""
    classes = {c for part in model.modules() if is_transformers(part) for c in type(part).__mro__}
    homes = {name: sys.modules[name] for name in sorted({c.__module__ for c in classes}) if name in sys.modules}
    with ExitStack() as stack:
        for home in homes.values():
            own = getattr(home, NAME, None)
            if own is not None and list(inspect.signature(own).parameters) == PARAMETERS:
                stack.enter_context(patch.object(home, NAME, _instead_of(own, real)))
        yield


def _instead_of(own: Callable[..., Any], real: Tensor | None) -> Callable[..., Any]:
    """`balance_loss` for the calls that it is defined for; the class's own function for others."""

    def loss(gate_logits: Any, num_experts: int | None = None, top_k: int = 2, attention_mask: Any = None) -> Any:
        if attention_mask is not None or num_experts is None or not isinstance(gate_logits, tuple):
            return own(gate_logits, num_experts, top_k, attention_mask)
        return balance_loss(gate_logits, num_experts, top_k, None if real is None else real.flatten())

    return loss


def weight_of(model: nn.Module, outputs: Any, where: str) -> float:
    """What the `aux_loss` of outputs is multiplied by before it is added to the mean loss: the factor of the
    transformers class in the model that gave them, 1 for outputs of other kinds. Raises ModelError where it has none.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(outputs, transformers.utils.ModelOutput):
        return 1.0
    for part in filter(is_transformers, model.modules()):
        config: Any = part.config
        for holder in (part, config.get_text_config()):
            found = [getattr(holder, name) for name in WEIGHTS if getattr(holder, name, None) is not None]
            if found:
                return float(found[0])
    hint = "set output_router_logits to false in config.json, or define loss(outputs, batch) in a file of your own"
    raise ModelError(f"{type(model).__name__} gives a loss of its own, and no {WEIGHTS[0]}", where, hint)
