"""A layer whose experts have a capacity equals a float64 loop over experts that counts its tokens itself."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from mgraph.models import ModelConfig
from mgraph.models.capacity import clear_tail, within_capacity, without_padding
from mgraph.models.experts import Experts
from mgraph.models.feed_forward import ACTIVATIONS

CASES: list[dict[str, Any]] = [
    {"capacity_factor": 1.0},
    {"capacity_factor": 0.5, "capacity_keeps": "position"},
    {"capacity_factor": 1.25, "router": "sigmoid", "top_k": 3, "mlp_bias": True},
    {"capacity_factor": 0.1, "router": "topk_softmax", "capacity_keeps": "position", "mlp_bias": True},
    {"capacity_factor": 8.0, "top_k": 1, "renormalize": False},
]


def by_expert(layer: Any, config: ModelConfig, x: Tensor) -> tuple[Tensor, list[int]]:
    """Each expert sorts those that chose it and takes what it has room for; and how many each took."""
    tokens = x.flatten(0, 1)
    scores = layer.router.scores(layer.router.proj(tokens))
    weights, chosen = scores.topk(config.top_k, -1)
    if config.router == "topk_softmax":
        weights = weights.softmax(-1)
    elif config.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    room = math.ceil(len(tokens) * config.top_k * config.capacity_factor / config.num_experts - 1e-9)
    out, taken = torch.zeros_like(tokens), []
    for e in range(config.num_experts):
        mine = [(t, k) for t in range(len(tokens)) for k in range(config.top_k) if chosen[t, k] == e]
        if config.capacity_keeps == "weight":
            mine.sort(key=lambda pair: -float(weights[pair].detach()))
        taken.append(len(mine[:room]))
        for t, k in mine[:room]:
            gate, up = (
                tokens[t] @ part.weight[e] + (0 if part.bias is None else part.bias[e])
                for part in (layer.gate, layer.up)
                if part is not None
            )
            hidden = ACTIVATIONS[config.act](gate) * up
            down = hidden @ layer.down.weight[e] + (0 if layer.down.bias is None else layer.down.bias[e])
            out[t] = out[t] + weights[t, k] * down
    return out.view(x.shape), taken


@pytest.mark.parametrize("changes", CASES, ids=str)
@pytest.mark.parametrize("shape", [(2, 9), (1, 1), (1, 3)])
def test_layer_equals_loop_over_experts(changes: dict[str, Any], shape: tuple[int, int]) -> None:
    config = ModelConfig(d_model=12, num_heads=2, d_ff=10, num_experts=5, **changes)
    layer = Experts(config).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.5)
    x = torch.randn(*shape, 12, dtype=torch.float64, requires_grad=True)
    wanted = torch.randn_like(x)
    leaves = [x, *layer.parameters()]
    expected, taken = by_expert(layer, config, x)
    got, _ = layer(x)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)  # the router works in f32
    expected_grads = torch.autograd.grad((expected * wanted).sum(), leaves, materialize_grads=True)
    for gradient, other in zip(torch.autograd.grad((got * wanted).sum(), leaves), expected_grads, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-6)
    _, experts, _ = layer.router(x.flatten(0, 1))
    assert experts.flatten().bincount(minlength=6)[:-1].tolist() == taken


def test_what_is_dropped() -> None:
    """Room for 4 * 2 / 4 * 1 tokens; of equal weights the first stays."""
    experts = torch.tensor([[0, 1], [0, 2], [2, 0], [0, 3]])
    weights = torch.tensor([[0.1, 0.9], [0.3, 0.7], [0.7, 0.3], [0.4, 0.6]])
    for keep in ("weight", "position"):
        made, numbers = within_capacity(weights, experts, 4, 1.0, keep)
        assert torch.equal(made, torch.where(numbers < 4, weights, 0.0))
    by_weight = within_capacity(weights, experts, 4, 1.0, "weight")[1]
    assert by_weight.tolist() == [[4, 1], [0, 2], [2, 4], [0, 3]]
    assert within_capacity(weights, experts, 4, 1.0, "position")[1].tolist() == [[0, 1], [0, 2], [2, 4], [4, 3]]


def test_a_factor_is_the_decimal_it_is_written_as() -> None:
    """10 * 1.1 is 11.000000000000002 in binary, which would be room for 12."""
    experts = torch.zeros(10, 1, dtype=torch.int64)
    kept = within_capacity(torch.rand(10, 1), experts, 10, 1.1, "weight")[1]
    assert int((kept == 0).sum()) == 2
    kept = within_capacity(torch.rand(100, 1), torch.zeros(100, 1, dtype=torch.int64), 10, 1.1, "weight")[1]
    assert int((kept == 0).sum()) == 11


def test_operators_are_registered_well() -> None:
    """Fake shapes, gradient registration and tracing agree with the real operators."""
    weights, experts = torch.rand(7, 2, requires_grad=True), torch.randint(3, (7, 2))
    assert set(opcheck(within_capacity, (weights, experts, 3, 1.0, "weight")).values()) == {"SUCCESS"}
    real = torch.tensor([True, False, True, True, False, True, False])
    assert set(opcheck(without_padding, (weights, experts, real, 3)).values()) == {"SUCCESS"}
    ends = torch.tensor([2, 5], dtype=torch.int32)
    rows = torch.full((7, 3), float("nan"))
    rows[:5] = 1
    assert set(opcheck(clear_tail, (rows.requires_grad_(), ends)).values()) == {"SUCCESS"}
    assert not torch.isnan(clear_tail(rows, ends)).any()
    (grad,) = torch.autograd.grad(clear_tail(rows, ends).sum(), rows)
    assert grad[:, 0].tolist() == [1] * 5 + [0] * 2


@pytest.mark.parametrize("factor", [-1.0, float("inf"), float("nan")])
def test_factors_without_a_meaning_are_refused(factor: float) -> None:
    with pytest.raises(ValueError, match="must be positive and finite, or 0 for none"):
        ModelConfig(num_experts=4, capacity_factor=factor)


def test_a_dense_model_has_no_capacity() -> None:
    with pytest.raises(ValueError, match="capacity_factor need num_experts"):
        ModelConfig(capacity_factor=1.0)


@pytest.mark.parametrize("name", ["grouped_linear", "within_capacity", "without_padding"])
def test_operators_are_found_in_a_process_that_reads_a_graph(name: str) -> None:
    code = f"from mgraph.ir.aten import overload; print(overload('zoo.{name}.default'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == f"zoo.{name}.default\n", done.stderr
