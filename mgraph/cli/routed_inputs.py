"""Operands of the ops of experts, for `mgraph tune`: which rows are whose has to fit the other operands.

A token's experts are drawn without preference, so that experts have about as many rows each. Names as in `ir.ops.moe`:
T tokens, E experts, K experts a token, R rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mgraph.ir.graph import Node
from mgraph.ir.types import DType

_CHOOSING = ("moe_route", "moe_route_order")
"""Ops that choose by their first operand, logits [T, E]."""
MOST_EXPERTS = 512
"""So many different logits bf16 has, evenly apart, of which a sigmoid in f32 gives different ones, too."""
_ROUTED = (
    "expert_glu",
    "expert_glu_grad",
    "expert_sum",
    "gathered_outer",
    "grouped_matmul",
    "grouped_matmul_sum",
    "grouped_outer",
    "moe_combine",
    "moe_combine_grad",
    "moe_dispatch",
    "moe_dispatch_grad",
    "moe_order",
    "moe_route_grad",
)
"""Ops some of whose operands are an order i64[R], ends i32[E] of the rows of experts, or choices i64[T, K]."""


def is_routed(node: Node) -> bool:
    """Whether the operands of a node can be made here: all rows are of an expert, and no logits need be alike."""
    if node.attrs.get("ended") or node.attrs.get("others"):
        return False
    if node.op in _CHOOSING:
        experts = node.operands[0].tensor.shape[-1]
        return isinstance(experts, int) and experts <= MOST_EXPERTS
    return node.op in _ROUTED


def routed(node: Node, made: Sequence[Tensor], generator: torch.Generator) -> list[Tensor]:
    """The operands of a routed node, which were `made` at random; those that choose, order or end rows are new."""
    if node.op in _CHOOSING:
        return [_distinct(made[0], generator), *made[1:]]
    given, experts = list(made), _experts(node, made)
    types = [value.tensor for value in node.operands]
    order, choice = (
        next((i for i, t in enumerate(types) if t.dtype is DType.I64 and len(t.shape) == dims), None) for dims in (1, 2)
    )
    end = next((i for i, t in enumerate(types) if t.dtype is DType.I32), None)
    if choice is not None:
        tokens, top_k = made[choice].shape
        given[choice] = _choices(tokens, top_k, experts, generator)
        return given
    rows = made[0 if order is None else order].shape[0]
    chosen = _choices(*_tokens(node, made, rows), experts, generator).flatten()
    if order is not None:
        given[order] = chosen.argsort(stable=True)
    if end is not None:
        given[end] = chosen.bincount(minlength=experts).cumsum(0).int()
    return given


def _experts(node: Node, made: Sequence[Tensor]) -> int:
    """How many experts there are; where no operand says it any order is as good as that of eight."""
    for value, tensor in zip(node.operands, made, strict=True):
        if value.tensor.dtype is DType.I32:  # the ends of their rows
            return tensor.shape[0]
    if node.op == "moe_route_grad":
        return max(tensor.shape[1] for tensor in made if tensor.dim() == 2)
    named = node.attrs.get("num_experts")
    return named if isinstance(named, int) else 8


def _tokens(node: Node, made: Sequence[Tensor], rows: int) -> tuple[int, int]:
    """Tokens and choices that rows are of."""
    top_k = node.attrs.get("top_k")
    if node.op == "expert_sum":
        top_k = made[2].shape[1]
    elif node.op in ("moe_combine", "moe_combine_grad"):
        top_k = next(t.shape[1] for t in made if t.dim() == 2 and t.shape[0] * t.shape[1] == rows)
    return (rows // top_k, top_k) if isinstance(top_k, int) else (rows, 1)


def _choices(tokens: int, top_k: int, experts: int, generator: torch.Generator) -> Tensor:
    """Different experts of each token, i64[T, K]."""
    drawn = torch.rand(tokens, max(experts, top_k), generator=generator, device=generator.device)
    return drawn.topk(top_k, -1).indices


def _distinct(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Logits like these, of which a token has no two alike: who comes first of equals is nobody's contract."""
    tokens, experts = logits.shape
    places = torch.rand(tokens, experts, generator=generator, device=generator.device).argsort(-1)
    return ((places - experts // 2) / max(16, experts // 8)).to(logits.dtype)
