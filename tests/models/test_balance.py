"""The balancer of eager training: counts of the choices, and what they move."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mgraph.models.balance import Balancer
from mgraph.models.config import ModelConfig
from mgraph.models.router import Router

CONFIG = ModelConfig(
    d_model=3,
    num_heads=1,
    num_kv_heads=1,
    head_width=2,
    num_experts=3,
    top_k=1,
    renormalize=False,
    router="sigmoid",
    selection_bias=True,
)


def _router() -> Router:
    router = Router(CONFIG)
    with torch.no_grad():
        router.proj.weight.copy_(torch.eye(3))
    return router


def _rows(*counts: int) -> Tensor:
    """So many rows that choose each expert."""
    return torch.cat([torch.eye(3)[e].expand(count, 3) * 9 for e, count in enumerate(counts)])


def test_loads_of_several_batches_move_the_bias_once() -> None:
    router = _router()
    balancer = Balancer(router, rate=0.125)
    router(_rows(4, 1, 1))
    router(_rows(1, 2, 0))
    assert balancer.loads[router].tolist() == [5, 3, 1]
    balancer.step()
    assert router.selection_bias is not None
    assert router.selection_bias.tolist() == [-0.125, 0.0, 0.125]
    assert balancer.loads[router].tolist() == [0, 0, 0]
    balancer.step()
    assert router.selection_bias.tolist() == [-0.125, 0.0, 0.125], "equal loads move nothing"


def test_evaluation_and_routers_without_a_bias_are_not_counted() -> None:
    router = _router()
    balancer = Balancer(router, rate=1.0)
    router.eval()(_rows(4, 1, 1))
    assert balancer.loads[router].tolist() == [0, 0, 0]
    assert Balancer(Router(replace(CONFIG, selection_bias=False)), rate=1.0).loads == {}
