"""Routers of a user's own in the place of the zoo's.

A router is a module that is called with the tokens [T, N] of a layer and gives (weights [T, K], experts i64[T, K]), or
these and a loss f32[] that is added to the model's (a balance, say). K, at most E, is the router's own; weights are of
any float dtype, and gradients reach the router through them. Experts of a token should differ, and must with
`--pad-to-capacity`; the number E, that of all experts, drops a choice, whatever its weight. Nothing else is asked of
it: it may have parameters, buffers and noise, and its states keep their own names (`layers.0.ffn.router.…`).

What fills up rows of several documents is dropped behind it. One whose forward has a second parameter `real`, bool[T],
is told in such rows which tokens are none of that: it leaves the others out of its loss, and drops them itself
(`models.capacity.without_padding`), before a capacity.

    model = models.get("moe", "tiny")
    use_router(model, lambda config: CosineRouter(config))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .config import ModelConfig

Choice = tuple[Tensor, Tensor, Tensor | None]
_OF_ROUTER = (
    "router",
    "renormalize",
    "routed_scale",
    "num_groups",
    "top_groups",
    "router_bias",
    "selection_bias",
    "capacity_factor",
    "capacity_keeps",
    "jitter",
    "choice_jitter",
    "balance_loss",
    "z_loss",
)
"""Options of a model that the zoo's router alone reads; `top_k` is one that others may take, too."""
_CONTRACT = "expected (weights [T, K], experts i64[T, K]) or these and a loss f32[]"


def use_router(model: nn.Module, make: Callable[[ModelConfig], nn.Module]) -> nn.Module:
    """The model with `make(config)` as the router of every layer that has experts; a router for each.

    Raises ValueError where no layer has experts, or where the model was given options that the router which is replaced
    would follow (a loss, a capacity): nobody would; TypeError where `make` gives no module.
    """
    from .experts import Experts

    layers = [module for module in model.modules() if isinstance(module, Experts)]
    if not layers:
        raise ValueError("no layer of the model has experts, and so a router")
    lost = [name for name in _OF_ROUTER if any(_asks(layer.config, name) for layer in layers)]
    if lost:
        capacity = " (a capacity by models.capacity.within_capacity)" if "capacity_factor" in lost else ""
        without = ", ".join(f"{name}={getattr(ModelConfig, name)!r}" for name in lost)
        raise ValueError(
            f"{', '.join(lost)} {'is' if len(lost) == 1 else 'are'} for the router of the zoo; a router of your own "
            f"has to do that itself{capacity}: build the model with {without}"
        )
    for layer in layers:
        router = make(layer.config)
        if not isinstance(router, nn.Module):
            raise TypeError(f"the router is a {type(router).__name__}, expected a module")
        layer.router = router
    return model


def _asks(config: ModelConfig, name: str) -> bool:
    """Whether an option asks the zoo's router for something; with one expert a token, `renormalize` has no choice."""
    forced = name == "renormalize" and config.top_k == 1
    return not forced and getattr(config, name) != getattr(ModelConfig, name)


def checked(made: Any, router: nn.Module, tokens: Tensor, num_experts: int) -> Choice:
    """What a router gave for tokens [T, N], with its loss or None. Raises TypeError or ValueError, which name the
    router and say what is wrong, where it breaks the contract; the experts themselves are not looked at."""
    name = f"the router {type(router).__name__}"
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not all(isinstance(t, Tensor) for t in made[:2]):
        raise TypeError(f"{name} gave {_told(made)}; {_CONTRACT}")
    weights, experts, *rest = made
    loss = rest[0] if rest else None
    if experts.dtype is not torch.int64 or not weights.dtype.is_floating_point:
        raise TypeError(f"{name} gave {_told(made)}; {_CONTRACT}")
    if experts.dim() != 2 or weights.shape != experts.shape or experts.shape[0] != tokens.shape[0]:
        raise ValueError(f"{name} gave {_told(made)} for tokens {list(tokens.shape)}; {_CONTRACT}")
    if not 1 <= experts.shape[1] <= num_experts:
        raise ValueError(f"{name} chose {experts.shape[1]} experts a token, expected 1 to {num_experts}")
    if loss is not None and (not isinstance(loss, Tensor) or loss.dim() or not loss.dtype.is_floating_point):
        raise ValueError(f"{name} gave the loss {_told(loss)}; {_CONTRACT}")
    return weights, experts, loss


def _told(made: Any) -> str:
    if isinstance(made, tuple):
        return f"({', '.join(map(_told, made))})"
    if isinstance(made, Tensor):
        return f"{str(made.dtype).removeprefix('torch.')}{list(made.shape)}"
    return f"a {type(made).__name__}" if made is not None else "None"
