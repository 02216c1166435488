"""Every tiny size of the zoo, raised and all-aten: loss, gradients and steps of AdamW against eager PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from mgraph.ir.graph import Module
from mgraph.runtime.package import Package, load_package
from mgraph.runtime.state import create_state
from tests.end_to_end.builds import ZOO, adamw, batches, build, eager_step, fill, loss_of, relative
from tests.families.builds import masks, replayed
from tests.sampling import sampled

RAISED = {"rms_norm", "rope", "attention", "glu", "squared_relu", "moe_route", "moe_dispatch", "moe_combine"}
EPSILON = 1e-5  # far above the rounding of gradients, which AdamW would else turn into whole steps
CASES = [(name, disable) for name in ZOO for disable in ("", "raise-*")]


@pytest.mark.parametrize(("name", "disable"), sampled(CASES, 3))
def test_a_tiny_size_trains_like_eager(name: str, disable: str, tmp_path: Path) -> None:
    built = build(name, tmp_path, disable=disable, eps=EPSILON)
    ops = {n.op for _, n in built.compilation.module.walk()}
    assert not RAISED & ops if disable else {"rms_norm", "attention", "rope"} <= ops
    package = load_package(built.path, "cpu")
    state = create_state(package.state_specs, 3, "cpu")
    model = built.eager()
    fill(model, state)
    module = built.compilation.module
    gradients_are_equal(module, package, state, model)
    steps_are_equal(module, package, state, model)


def gradients_are_equal(module: Module, package: Package, state: dict[str, torch.Tensor], model: nn.Module) -> None:
    """Loss sum, count and every gradient of two microbatches, each on its own; the accumulators are zero afterwards."""
    fresh = {name: tensor.clone() for name, tensor in state.items()}
    for tokens, labels in batches(1) + batches(1, batch=1, seq=45, seed=1):
        model.zero_grad()
        with replayed(masks(module, state, tokens)):
            loss = loss_of(model, tokens, labels)
            loss.backward()
        out = package.call("microbatch", state, tokens, labels)
        assert relative(out["loss_sum"], loss.detach()) <= 1e-5
        assert int(out["count"]) == int((labels != -100).sum())
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert relative(state[f"{name}.grad"], parameter.grad) <= 1e-5, name
        for name, tensor in fresh.items():
            state[name].copy_(tensor)


def steps_are_equal(module: Module, package: Package, state: dict[str, torch.Tensor], model: nn.Module) -> None:
    """The losses of five steps, and the parameters after them."""
    optimizer = adamw(model, EPSILON)
    for tokens, labels in batches(5, seed=7):
        with replayed(masks(module, state, tokens)):
            loss = eager_step(model, optimizer, tokens, labels)
        package.call("microbatch", state, tokens, labels)
        out = package.call("finish", state, torch.tensor(1e-3))
        torch.testing.assert_close(out["loss"], loss, rtol=1e-5, atol=0)
    for name, parameter in model.named_parameters():
        assert relative(state[name], parameter.detach()) <= 1e-4, name
