"""The mixture-of-experts decoder: as the dense one, with routed experts for the MLP (the Mixtral family).

Shapes: T tokens, N model width, E experts, K experts a token, F gated width of an expert.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .config import ModelConfig
from .grouped import grouped_linear
from .layers import ACTIVATIONS, Decoder, output_std, projection


class Router(nn.Module):
    """Chooses K experts a token: the K largest of softmax(x W) in float32, optionally scaled to sum to 1."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.proj = projection(config.d_model, config.num_experts, config.init_std)
        self.top_k = config.top_k
        self.renormalize = config.renormalize

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, N] -> weights f32[T, K], experts i64[T, K], by falling weight."""
        probabilities = torch.softmax(self.proj(x).float(), dim=-1)
        weights, experts = torch.topk(probabilities, self.top_k, dim=-1)
        if self.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, experts


class Experts(nn.Module):
    """y = sum over a token's experts e of weight_e * down_e(act(gate_e(x)) * up_e(x)); no token is dropped."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        num_experts, width, gated = config.num_experts, config.d_model, config.d_ff
        self.router = Router(config)
        self.gate = nn.Parameter(torch.empty(num_experts, width, gated))
        self.up = nn.Parameter(torch.empty(num_experts, width, gated))
        self.down = nn.Parameter(torch.empty(num_experts, gated, width))
        self.act = ACTIVATIONS[config.act]
        nn.init.normal_(self.gate, std=config.init_std)
        nn.init.normal_(self.up, std=config.init_std)
        nn.init.normal_(self.down, std=output_std(config))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, N] -> [B, S, N]. The weighted sum is made in float32."""
        tokens = x.flatten(0, 1)
        weights, experts = self.router(tokens)
        top_k = experts.shape[1]

        # One row for each (token, expert) pair, sorted by expert; ends[e] is where the rows of expert e end.
        by_expert, order = torch.sort(experts.flatten(), stable=True)
        expert_ids = torch.arange(self.gate.shape[0], device=x.device)
        ends = torch.searchsorted(by_expert, expert_ids, right=True, out_int32=True)
        rows = tokens[order // top_k]

        hidden = self.act(grouped_linear(rows, self.gate, ends)) * grouped_linear(rows, self.up, ends)
        rows = grouped_linear(hidden, self.down, ends)

        rows = rows[torch.argsort(order)].view(-1, top_k, x.shape[-1])
        mixed: Tensor = (rows.float() * weights.unsqueeze(-1)).sum(1)
        return mixed.to(x.dtype).view(x.shape)


class MixtureOfExperts(Decoder):
    """Every token passes through the K experts of its choice. `forward(tokens, position_ids=None)` gives logits."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, Experts)
