"""The mixture of experts: each token passes through the experts that a router chose and that have room for it.

Shapes: B batch, S sequence, T = B * S tokens, N model width, E experts, K experts a token, F width of an expert.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn
from torch.nn import functional

from .capacity import clear_tail, without_padding
from .config import ModelConfig
from .custom_router import Choice, checked
from .feed_forward import FeedForward, hidden_units, is_gated
from .grouped import grouped_linear
from .layers import output_std
from .router import Router


class GroupedLinear(nn.Module):
    """One linear layer per expert, over rows sorted by expert."""

    def __init__(self, config: ModelConfig, num_inputs: int, num_outputs: int, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_experts, num_inputs, num_outputs))
        nn.init.normal_(self.weight, std=std)
        self.bias = nn.Parameter(torch.zeros(config.num_experts, num_outputs)) if config.mlp_bias else None

    def forward(self, rows: Tensor, ends: Tensor, experts: Tensor, drops: bool) -> Tensor:
        """rows [R, N], the end of each expert's rows i32[E], the expert of each row i64[R] -> [R, M]. With `drops` the
        last rows may have the number E: what they give may be anything."""
        out: Tensor = grouped_linear(rows, self.weight, ends)
        if self.bias is None:
            return out
        bias: Tensor = self.bias
        if drops:
            bias = functional.pad(bias, (0, 0, 0, 1))
        return out + bias[experts]


class Experts(nn.Module):
    """y = sum over a token's experts e of weight_e * down_e(hidden_units(up_e(x), gate_e(x))), plus the shared one."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        width = config.d_model
        self.router: nn.Module = Router(config)
        self.gate = GroupedLinear(config, width, config.d_ff, config.init_std) if is_gated(config) else None
        self.up = GroupedLinear(config, width, config.d_ff, config.init_std)
        self.down = GroupedLinear(config, config.d_ff, width, output_std(config))
        self.shared = FeedForward(config, config.shared_d_ff) if config.shared_d_ff else None

    def forward(self, x: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """x [B, S, N] -> [B, S, N], and the router's loss f32[] if it has one. The weighted sum is made in float32.

        What is not `real`, bool[B, S], is padding, which no expert gets.
        """
        tokens = x.flatten(0, 1)
        weights, experts, loss = self.chosen(tokens, None if real is None else real.flatten())
        top_k = experts.shape[1]
        drops = bool(self.config.capacity_factor) or real is not None or not isinstance(self.router, Router)

        # One row for each (token, expert) pair, sorted by expert; ends[e] is where the rows of expert e end.
        by_expert, order = torch.sort(experts.flatten(), stable=True)
        expert_ids = torch.arange(self.config.num_experts, device=x.device)
        ends = torch.searchsorted(by_expert, expert_ids, right=True, out_int32=True)
        rows = tokens[order // top_k]
        if drops:  # dropped rows come last: a gradient may be anything there
            rows = clear_tail(rows, ends)

        gate = None if self.gate is None else self.gate(rows, ends, by_expert, drops)
        hidden = hidden_units(self.config, self.up(rows, ends, by_expert, drops), gate)
        rows = self.down(hidden, ends, by_expert, drops)
        if drops:
            rows = clear_tail(rows, ends)

        rows = rows[torch.argsort(order)].view(-1, top_k, x.shape[-1])
        mixed = (rows.float() * weights.unsqueeze(-1)).sum(1).to(x.dtype).view(x.shape)
        return mixed if self.shared is None else mixed + self.shared(x), loss

    def chosen(self, tokens: Tensor, real: Tensor | None) -> Choice:
        """What the router, or one in its place, gives for tokens [T, N], of which those that are not `real`, bool[T],
        are no expert's: one that does not take `real` need not know."""
        knows = real is not None and "real" in inspect.signature(type(self.router).forward).parameters
        made = self.router(tokens, real) if knows else self.router(tokens)
        weights, experts, loss = checked(made, self.router, tokens, self.config.num_experts)
        if real is not None and not knows:
            weights, experts = without_padding(weights, experts, real, self.config.num_experts)
        return weights, experts, loss
