"""The router of a mixture of experts: which experts a token goes to, and with which weights.

Shapes: T tokens, N model width, E experts, K experts a token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .capacity import within_capacity, without_padding
from .config import ModelConfig
from .layers import projection

_TINY = 1e-20  # sigmoids may all be 0


def within_best_groups(scores: Tensor, num_groups: int, top_groups: int) -> Tensor:
    """scores [T, E] with -inf outside of each token's best groups of neighbouring experts.

    A group is as good as the sum of its two best scores.
    """
    grouped = scores.unflatten(1, (num_groups, -1))
    quality = grouped.topk(2, dim=-1).values.sum(-1)
    best = quality.topk(top_groups, dim=-1).indices
    outside = torch.ones_like(quality, dtype=torch.bool).scatter(1, best, False)
    kept: Tensor = grouped.masked_fill(outside.unsqueeze(-1), float("-inf"))
    return kept.flatten(1)


def mean_of(values: Tensor, real: Tensor | None) -> Tensor:
    """The mean of values [T, ...] over the tokens that are `real`, bool[T]; 0 where none is. None: over all."""
    if real is None:
        return values.mean(0)
    taken = real.view(-1, *[1] * (values.dim() - 1))
    return values.masked_fill(~taken, 0.0).sum(0) / real.sum().clamp(min=1)


def choices_of_each(probabilities: Tensor, experts: Tensor, real: Tensor | None) -> Tensor:
    """How often `real` tokens, bool[T] or None for all, chose each expert: f32[E].

    probabilities f32[T, E], experts i64[T, K].
    """
    chosen = experts.flatten()
    if real is None:
        ones = torch.ones_like(chosen, dtype=torch.float32)
    else:
        ones = real.unsqueeze(1).expand_as(experts).flatten().to(torch.float32)
    return torch.zeros_like(probabilities[0]).index_add(0, chosen, ones)


def balance_loss(probabilities: Tensor, experts: Tensor, real: Tensor | None = None) -> Tensor:
    """E * sum over e of (share of the choices that are e) * (mean probability of e), of `real` tokens: f32[], 1 in
    balance.

    probabilities f32[T, E] with rows that sum to 1, experts i64[T, K], real bool[T] or None for all.
    """
    counts = choices_of_each(probabilities, experts, real)
    total = counts.sum() if real is None else counts.sum().clamp(min=1)
    return probabilities.shape[1] * (counts / total * mean_of(probabilities, real)).sum()


def jittered(x: Tensor, size: float) -> Tensor:
    """x times random numbers in 1 - size .. 1 + size."""
    return x * (1 + size * (2 * torch.rand_like(x) - 1))


class Router(nn.Module):
    """Chooses the K experts of highest score (in float32) and weighs them by their scores.

    `selection_bias` is state that no gradient reaches: whoever trains (`balance.Balancer`) adds rate * sign(mean load -
    load of e) after each step, and overloaded experts are chosen less often.
    """

    selection_bias: Tensor | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.proj = projection(config.d_model, config.num_experts, config.init_std, bias=config.router_bias)
        bias = torch.zeros(config.num_experts, dtype=torch.float32) if config.selection_bias else None
        self.register_buffer("selection_bias", bias)

    def forward(self, x: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """x [T, N] -> weights f32[T, K], experts i64[T, K], and the router's loss f32[] if it has one.

        Tokens that are not `real`, bool[T], are padding: no expert's, and not in the loss. They, and with a capacity
        what an expert drops, have weight 0 and the number E; the loss is that of all choices of the others.
        """
        config = self.config
        if config.jitter and self.training:
            x = jittered(x, config.jitter)
        logits = self.proj(x).float()
        scores = self.scores(logits)
        weights, experts = self.choose(scores)
        if config.router == "topk_softmax":
            weights = weights.softmax(-1)
        elif config.renormalize:
            total = weights.sum(-1, keepdim=True)
            weights = weights / (total + _TINY if config.router == "sigmoid" else total)
        if config.routed_scale != 1.0:
            weights = weights * config.routed_scale
        if real is not None:
            weights, experts = without_padding(weights, experts, real, config.num_experts)
        if config.capacity_factor:
            weights, experts = within_capacity(
                weights, experts, config.num_experts, config.capacity_factor, config.capacity_keeps
            )
        return weights, experts, self.loss(logits, scores, real) if config.has_router_loss else None

    def scores(self, logits: Tensor) -> Tensor:
        """logits f32[T, E] -> what experts are chosen by, f32[T, E]."""
        match self.config.router:
            case "softmax":
                return logits.softmax(-1)
            case "sigmoid":
                return logits.sigmoid()
            case "topk_softmax":
                return logits

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """scores f32[T, E] -> those of the K best experts f32[T, K], and the experts i64[T, K]."""
        config = self.config
        noisy = config.choice_jitter and self.training
        if self.selection_bias is None and config.num_groups == 1 and not noisy:
            weights, experts = scores.topk(config.top_k, dim=-1)
            return weights, experts
        choice = scores if self.selection_bias is None else scores + self.selection_bias
        if noisy:
            choice = jittered(choice, config.choice_jitter)
        if config.num_groups > 1:
            choice = within_best_groups(choice, config.num_groups, config.top_groups)
        experts = choice.topk(config.top_k, dim=-1).indices
        return scores.gather(1, experts), experts

    def loss(self, logits: Tensor, scores: Tensor, real: Tensor | None) -> Tensor:
        """The weighted sum of `balance_loss` (of the plain choice: no groups, no bias) and z loss, of tokens that are
        `real`, f32[]."""
        config = self.config
        total = logits.new_zeros(())
        if config.balance_loss:
            if config.router == "sigmoid":
                probabilities = scores / (scores.sum(-1, keepdim=True) + _TINY)
            else:
                probabilities = logits.softmax(-1)
            plain = probabilities.topk(config.top_k, dim=-1).indices
            total = total + config.balance_loss * balance_loss(probabilities, plain, real)
        if config.z_loss:
            total = total + config.z_loss * mean_of(logits.logsumexp(-1).square(), real)
        return total
