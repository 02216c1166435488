"""Layouts of checkpoints, found by running a form without values: the parts rebuild what the form gives with values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mgraph import models
from mgraph.capture.weight_layout import checkpoint_form, layout
from mgraph.errors import ModelError
from mgraph.models import huggingface
from tests.families.configs import CONFIGS, eager

SHAPES = {"experts": (3, 8, 5), "a": (3, 5), "b": (4, 5), "c": (6,)}
Weights = dict[str, Tensor]


def one_by_one(weights: Weights) -> Weights:
    """Each expert, its two halves apart."""
    made: Weights = {}
    for number, expert in enumerate(weights["experts"].unbind(0)):
        gate, up = expert.chunk(2, 0)
        made |= {f"{number}.gate": gate.contiguous(), f"{number}.up": up.t().clone()}
    return made


FORMS: dict[str, tuple[Callable[[Weights], Weights], int]] = {
    "itself": (lambda w: dict(w), 0),
    "renamed": (lambda w: {f"x.{name}": t for name, t in w.items()}, 4),
    "one by one": (one_by_one, 6),
    "rows": (lambda w: {"ab": torch.cat((w["a"], w["b"])), "c": w["c"]}, 1),
    "columns": (lambda w: {"aa": torch.cat([w["a"], w["a"][:, 1:3]], dim=1)}, 1),
    "by turns": (lambda w: {"aa": torch.stack((w["a"], w["b"][:3]), -1).flatten(-2)}, 1),
    "same name": (lambda w: {"a": w["a"].t()}, 1),
}


def rebuilt(items: list[dict[str, Any]], weights: Mapping[str, Tensor]) -> Weights:
    """The tensors of a file, put together as a layout says."""
    made = {}
    for item in items:
        tensor = torch.full(item["shape"], float("nan"))
        for part in item["parts"]:
            source, target = (
                t.as_strided(part["shape"], view[1:], view[0])
                for t, view in ((weights[part["state"]], part["from"]), (tensor, part["to"]))
            )
            target.copy_(source)
        made[item["tensor"]] = tensor
    return made


@pytest.mark.parametrize("name", FORMS)
def test_parts_rebuild_the_tensors(name: str) -> None:
    form, count = FORMS[name]
    weights = {n: torch.randn(shape) for n, shape in SHAPES.items()}
    found = layout(form, SHAPES)
    assert len(found) == count
    expected = form(weights)
    assert expected.keys() - {item["tensor"] for item in found} <= weights.keys()
    for tensor, value in rebuilt(found, weights).items():
        assert torch.equal(value, expected[tensor]), tensor


@pytest.mark.parametrize(
    "form",
    [
        lambda w: {"a": w["a"] + 1},
        lambda w: {"a": torch.cat((w["a"], w["b"]))[2:5]},
        lambda w: {"a": torch.cat((w["a"] * 2, w["b"]))},
        lambda w: {"a": torch.zeros(3)},
    ],
    ids=["computed", "part of a concatenation", "concatenation of computed", "made"],
)
def test_other_forms_are_refused(form: Callable[[Weights], Weights]) -> None:
    with pytest.raises(ModelError, match=r"'a' .*is computed, not put together"):
        layout(form, SHAPES)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "bert"])
def test_transformers_says_its_own_form(name: str) -> None:
    from transformers.core_model_loading import revert_weight_conversion

    model: Any = eager(name)
    weights = dict(model.named_parameters())
    form = checkpoint_form(model, list(weights), "{}")
    assert form.configuration == "{}"
    expected = revert_weight_conversion(model, dict(weights))
    found = rebuilt(form.layout, {n: p.detach() for n, p in weights.items()})
    covered = {part["state"] for item in form.layout for part in item["parts"]}
    assert expected.keys() == found.keys() | (weights.keys() - covered)
    assert all(torch.equal(value, expected[n]) for n, value in found.items())
    assert bool(found) == (name in ("qwen3-moe", "mixtral", "deepseek-v3"))


@pytest.mark.parametrize("name", ["qwen3", "mixtral", "gpt-oss"])
def test_the_zoo_has_that_of_its_twin(name: str) -> None:
    model = models.get(name)
    weights = {n: p.detach() for n, p in model.named_parameters()}
    form = checkpoint_form(model, list(weights), None)
    expected = huggingface.checkpoint(model.config, weights)
    found = rebuilt(form.layout, weights)
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[n]) for n, value in found.items())
    assert form.configuration is not None and huggingface.configuration(model.config) is not None


class Taller(models.Decoder):
    """A decoder with a parameter that its twin has not."""

    def __init__(self) -> None:
        super().__init__(models.SIZES["dense"]["tiny"])
        self.extra = nn.Parameter(torch.zeros(3))


@pytest.mark.parametrize("module", [nn.Linear(3, 4), Taller()], ids=["linear", "taller"])
def test_other_modules_lie_as_they_are(module: nn.Module) -> None:
    form = checkpoint_form(module, [name for name, _ in module.named_parameters()], None)
    assert form.layout == [] and form.configuration is None
