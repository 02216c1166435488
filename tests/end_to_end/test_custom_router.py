"""Routers of a user's own in packages: gradients of eager, experts that ranks share, replay, experts out of range."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from mgraph.compiler import compile_package
from mgraph.errors import PackageError, PassError
from mgraph.recipe import Recipe
from mgraph.runtime.package import load_package
from mgraph.runtime.state import create_state
from tests.end_to_end.builds import fill
from tests.end_to_end.processes import RUN
from tests.end_to_end.test_runs import command, run

EXAMPLE = Path(__file__).parents[2] / "examples/custom_router.py"
HASHED = '''
import torch
from torch import nn

from mgraph import models
from mgraph.models.custom_router import use_router


class Hash(nn.Module):
    """Experts by the place of the token alone; `shift` moves them."""

    def __init__(self, shift):
        super().__init__()
        self.register_buffer("shift", torch.tensor(shift))

    def forward(self, tokens):
        first = torch.arange(tokens.shape[0], device=tokens.device) * 5 % 8
        experts = torch.stack([first, (first + 3) % 8], 1) + self.shift
        return torch.full(experts.shape, 0.5, device=tokens.device), experts


def model():
    return use_router(models.get("moe", "tiny"), lambda config: Hash(0))


class Dropping(Hash):
    """The same, where every third token has one expert only."""

    def forward(self, tokens):
        weights, experts = super().forward(tokens)
        third = (torch.arange(tokens.shape[0], device=tokens.device) % 3 == 0)[:, None]
        second = torch.arange(2, device=tokens.device) == 1
        return weights, torch.where(third & second, 8, experts)


def dropping():
    return use_router(models.get("moe", "tiny"), lambda config: Dropping(0))


class Table(Hash):
    """The same, by a table that it makes anew each time."""

    def forward(self, tokens):
        table = torch.tensor([0, 5, 2, 7, 4, 1, 6, 3], device=tokens.device)
        first = table[torch.arange(tokens.shape[0], device=tokens.device) % 8]
        experts = torch.stack([first, (first + 3) % 8], 1)
        return torch.full(experts.shape, 0.5, device=tokens.device), experts


def by_table():
    return use_router(models.get("moe", "tiny"), lambda config: Table(0))


def beyond():
    return use_router(models.get("moe", "tiny"), lambda config: Hash(3))
'''


def _module(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def hashed(tmp_path: Path) -> Path:
    """A file with the router by places."""
    file = tmp_path / "hashed.py"
    file.write_text(HASHED)
    return file


def _compiled(file: Path, factory: str, directory: Path, **options: object) -> Path:
    recipe = Recipe(model=f"{file}:{factory}", output=str(directory), arch="none", **options)  # type: ignore[arg-type]
    return Path(str(compile_package(recipe).package))


def _eager(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """The loss of a model that torch runs, with that of its router; gradients are left in its parameters."""
    out = model(tokens)
    logits = getattr(out, "logits", out)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss = loss + tokens.numel() * getattr(out, "aux_loss", torch.zeros(()))
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("kind", ["cosine", "hashed"])
def test_loss_and_gradients_are_those_of_eager(kind: str, hashed: Path, tmp_path: Path) -> None:
    file = EXAMPLE if kind == "cosine" else hashed
    package = load_package(_compiled(file, "model", tmp_path / "package", replayable_routing=True), "cpu")
    state = create_state(package.state_specs, 3, "cpu")
    model = _module(file).model().train()
    fill(model, state)
    tokens, labels = torch.randint(0, 256, (2, 2, 7))
    loss = _eager(model, tokens, labels)
    free = torch.full((2, 7, 2, 2), -1, dtype=torch.int16)
    made = package.call("microbatch", state, tokens, labels, free)
    torch.testing.assert_close(made["loss_sum"], loss, rtol=1e-5, atol=1e-5)
    for name, parameter in model.named_parameters():
        grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        torch.testing.assert_close(state[f"{name}.grad"], grad, rtol=1e-3, atol=1e-4)
    again = package.call("microbatch", state, tokens, labels, made["routing"])
    assert torch.equal(again["loss_sum"], made["loss_sum"])
    other = package.call("microbatch", state, tokens, labels, (made["routing"] + 1) % 8)
    assert not torch.equal(other["loss_sum"], made["loss_sum"])


def test_a_dropped_choice_is_computed_nowhere(hashed: Path, tmp_path: Path) -> None:
    package = load_package(_compiled(hashed, "dropping", tmp_path / "package"), "cpu")
    state = create_state(package.state_specs, 3, "cpu")
    model = _module(hashed).dropping().train()
    fill(model, state)
    tokens, labels = torch.randint(0, 256, (2, 2, 7))
    loss = _eager(model, tokens, labels)
    made = package.call("microbatch", state, tokens, labels)
    torch.testing.assert_close(made["loss_sum"], loss, rtol=1e-5, atol=1e-5)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(state[f"{name}.grad"], parameter.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.full
def test_ranks_share_experts_that_it_chooses(tmp_path: Path) -> None:
    found = []
    for processes, mesh in ((1, "dp=1"), (2, "ep=2")):
        package = _compiled(EXAMPLE, "model", tmp_path / mesh, mesh=mesh)
        out = tmp_path / f"run-{processes}"
        done = run(*command(package, out, processes, *RUN.split()))
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
        found.append([line["loss"] for line in lines if "loss" in line])
    assert len(found[0]) == 3
    assert found[1] == pytest.approx(found[0], rel=1e-4)


def test_an_expert_that_there_is_not_is_told_of(hashed: Path, tmp_path: Path) -> None:
    package = load_package(_compiled(hashed, "beyond", tmp_path / "package"), "cpu")
    state = create_state(package.state_specs, 3, "cpu")
    tokens = torch.randint(0, 256, (2, 7))
    with pytest.raises(PackageError, match="a router chose expert 10, and the experts are 0 to 7"):
        package.call("microbatch", state, tokens, tokens)


def test_a_tensor_of_numbers_is_told_of(hashed: Path, tmp_path: Path) -> None:
    """A step would copy it from the host each time."""
    with pytest.raises(PassError, match=r"makes a tensor of numbers, \[0, 5, 2, 7, …\], in every step") as caught:
        _compiled(hashed, "by_table", tmp_path / "package")
    assert "hashed.py" in str(caught.value.where) and "self.register_buffer" in str(caught.value.hint)
    assert not (tmp_path / "package").exists()
