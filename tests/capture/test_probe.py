"""Which layers a probe finds to do the same, and what makes it refuse others."""

from __future__ import annotations

import pytest
import torch

from mgraph.capture.probe import Findings, probe
from tests.capture import layered


def found(model: str) -> Findings:
    """What a probe finds of one of the layered models."""
    return probe(getattr(layered, model)(), (torch.zeros(2, 16, dtype=torch.int64),))


@pytest.mark.parametrize("model", ["plain", "dropout", "noise", "tied", "returning", "sequential", "without_gradient"])
def test_one_kind(model: str) -> None:
    assert found(model) == Findings({f"layers.{i}": 1 for i in range(4)}, {"layers": 4}, {"layers": {}})


@pytest.mark.parametrize(
    ("model", "kinds"),
    [
        ("by_pairs", {0: 1, 1: 2, 2: 1, 3: 2}),
        ("detached", {1: 1, 2: 1, 3: 1}),
        ("frozen_layer", {0: 1, 1: 1, 3: 1}),
        ("by_length", {0: 1, 1: 1, 3: 1}),
        ("by_index", {}),
        ("counting_all", {}),
    ],
)
def test_layers_that_do_something_else(model: str, kinds: dict[int, int]) -> None:
    findings = found(model)
    assert findings.kinds == {f"layers.{i}": kind for i, kind in kinds.items()}
    others = 4 - len(kinds)
    assert findings.reasons["layers"] == ({"does what no other layer does": others} if others else {})


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("counting", "forward changes 'layers.0.count'"),
        ("constant", "reads a tensor that it is not handed"),
        ("escaping", "makes a tensor that is read outside without being returned"),
        ("hooked", "makes a tensor that is read outside without being returned"),
        ("reaching", "reads a tensor that it is not handed"),
        ("writing", "changes a tensor in place that it did not make"),
        ("in_region", "runs without gradients, or under autocast"),
        ("twice", "runs 2 times"),
        ("by_value", "it does not run on sizes alone (RuntimeError)"),
    ],
)
def test_unfit_layers(model: str, reason: str) -> None:
    findings = found(model)
    assert findings == Findings({}, {"layers": 4}, {"layers": {reason: 4}})
    assert findings.lines({}) == (f"layers: 4 layers, 4 traced, 0 copied; 4 not copied: {reason}",)


def test_a_hook_on_a_layer() -> None:
    model = layered.Model(lambda block, h: h)
    model.layers[1].register_forward_hook(lambda part, given, made: made * 2)
    findings = probe(model, (torch.zeros(2, 16, dtype=torch.int64),))
    assert findings.reasons == {"layers": {"has hooks": 1}}
    assert sorted(findings.kinds) == ["layers.0", "layers.2", "layers.3"]


def test_the_model_is_as_it_was() -> None:
    model = layered.counting()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    probe(model, (torch.zeros(2, 16, dtype=torch.int64),))
    assert all(block.count == 0 for block in model.layers)  # type: ignore[union-attr]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert model(torch.zeros(2, 16, dtype=torch.int64)).shape == (2, 16, 32)
