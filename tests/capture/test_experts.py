"""The traced experts of transformers against the classes' own forward: values and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mgraph.capture.experts import experts_forward, register
from tests.families.configs import eager

FAMILIES = ["qwen3-moe", "mixtral", "gpt-oss"]
EXPERTS = {"qwen3-moe": 8, "mixtral": 4, "gpt-oss": 4}
ROUTINGS = {
    "mixed": lambda experts: torch.rand(13, experts).topk(2, -1).indices,
    "one token": lambda experts: torch.tensor([[1, 0]]),
    "fewer tokens than experts": lambda experts: torch.rand(3, experts).topk(2, -1).indices,
    "one hot expert": lambda experts: torch.full((7, 1), experts - 1),
    "all experts": lambda experts: torch.rand(5, experts).topk(experts, -1).indices,
}


def run(name: str, indices: torch.Tensor, dtype: torch.dtype, weights_dtype: torch.dtype, *, ours: bool) -> Any:
    model = eager(name, seed=2, dtype=dtype, _experts_implementation="eager")
    (experts, *_) = (m for m in model.modules() if type(m).__name__.endswith("Experts"))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    x = torch.randn(len(indices), 64, generator=generator).to(dtype).requires_grad_()
    weights = torch.rand(indices.shape, generator=generator).to(weights_dtype).requires_grad_()
    y = experts_forward(experts, x, indices, weights) if ours else experts(x, indices, weights)
    y.backward(torch.randn(y.shape, generator=generator).to(y.dtype))
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in experts.parameters()]
    return [y.detach(), x.grad, weights.grad, *grads]


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("name", FAMILIES)
def test_equal_the_class(name: str, routing: str) -> None:
    indices = ROUTINGS[routing](EXPERTS[name])
    made = run(name, indices, torch.float32, torch.float32, ours=True)
    expected = run(name, indices, torch.float32, torch.float32, ours=False)
    for ours, theirs in zip(made, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILIES)
def test_bf16_is_near_the_class_and_of_its_dtypes(name: str, weights_dtype: torch.dtype) -> None:
    indices = ROUTINGS["mixed"](EXPERTS[name])
    made = run(name, indices, torch.bfloat16, weights_dtype, ours=True)
    expected = run(name, indices, torch.bfloat16, weights_dtype, ours=False)
    for ours, theirs in zip(made, expected, strict=True):
        assert ours.dtype == theirs.dtype
        distance = (ours.double() - theirs.double()).norm() / theirs.double().norm()
        assert distance <= 2e-2


def test_the_name_is_known_to_transformers() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    assert ALL_EXPERTS_FUNCTIONS[register()] is experts_forward
