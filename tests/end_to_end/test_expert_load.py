"""Loads of experts in the log: those that hooks on the eager model count, over microbatches and ranks."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from mgraph import models
from mgraph.compiler import compile_package
from mgraph.errors import PassError
from mgraph.recipe import Recipe
from mgraph.runtime.package import load_package
from mgraph.runtime.state import create_state
from tests.end_to_end.builds import batches, build, fill
from tests.end_to_end.test_runs import command, run

CUSTOM = Path(__file__).parents[2] / "examples" / "custom_router.py"
CASES: list[tuple[str, dict[str, Any]]] = [
    ("moe-tiny-capacity", {}),
    ("moe-tiny", {"recompute": "full"}),
    ("moe-tiny-grouped", {"expert_bias_rate": 0.01}),
]


def counted(model: Any, tokens: torch.Tensor) -> list[list[int]]:
    """How often the routers of a model choose each of 8 experts, by layer."""
    found: list[list[int]] = []

    def count(_router: Any, _: Any, made: Any) -> None:
        found.append(made[1].flatten().bincount(minlength=9)[:8].tolist())

    hooks = [layer.ffn.router.register_forward_hook(count) for layer in model.layers]
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize(("name", "options"), CASES)
def test_finish_tells_what_eager_counts(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    built = build(name, tmp_path, expert_load=True, **options)
    package = load_package(built.path, "cpu")
    state = create_state(package.state_specs, 3, "cpu")
    model = models.get(*name.split("-", 1)).train()
    fill(model, state)
    layers = package.manifest["expert_loads"]
    assert [layer["experts"] for layer in layers] == [8, 8]
    assert all(f"layers.{i}." in layer["layer"] for i, layer in enumerate(layers))
    for tokens, labels in batches(1, batch=4):
        expected = torch.zeros(2, 8, dtype=torch.int64)
        for half in (slice(0, 1), slice(1, 4)):
            package.call("microbatch", state, tokens[half], labels[half])
            package.call("evaluate", state, tokens, labels)
            expected += torch.tensor(counted(model, tokens[half]))
        told = package.call("finish", state, torch.tensor(1e-3))["expert_loads"]
        assert told.view(2, 8).tolist() == expected.tolist()
    again = package.call("finish", state, torch.tensor(1e-3))["expert_loads"]
    assert not again.any(), "counts begin again with each step"


ZOO_MODEL = """
from mgraph import models


def model():
    return models.get("moe", "tiny", {options})
"""
ROUTERS = {
    "a_choice_of_the_loss": 'router="topk_softmax", balance_loss=0.01',
    "and_a_capacity": 'router="topk_softmax", balance_loss=0.01, capacity_factor=1.0',
    "one_that_is_not_raised": "choice_jitter=0.5",
    "one_that_is_not_raised_and_a_balance": "choice_jitter=0.5, balance_loss=0.01",
}


def package_of(model: Path, directory: Path, **options: Any) -> Any:
    """The package of a model in a file."""
    compile_package(Recipe(model=f"{model}:model", output=str(directory), arch="none", **options))
    return load_package(directory, "cpu")


@pytest.mark.parametrize("name", [*ROUTERS, "custom"])
def test_each_way_to_experts_counts_once(name: str, tmp_path: Path) -> None:
    """Whoever chooses, and whatever else reads a choice: the counts of a step are what experts get."""
    file = tmp_path / "model.py"
    file.write_text(ZOO_MODEL.format(options=ROUTERS[name]) if name in ROUTERS else CUSTOM.read_text())
    package = package_of(file, tmp_path / "package", expert_load=True)
    state = create_state(package.state_specs, 3, "cpu")
    model = runpy.run_path(str(file))["model"]().train()
    fill(model, state)
    if (
        name in ROUTERS and "jitter" in ROUTERS[name]
    ):  # noise chooses, which eager draws otherwise: as many all the same
        model = None
    for tokens, labels in batches(1, batch=4):
        package.call("microbatch", state, tokens, labels)
        told = package.call("finish", state, torch.tensor(1e-3))["expert_loads"].view(2, 8)
        assert told.sum(1).tolist() == [2 * tokens.numel()] * 2 or "capacity" in ROUTERS.get(name, "")
        if model is not None:
            assert told.tolist() == counted(model, tokens)


@pytest.mark.full
@pytest.mark.parametrize("name", ["one_that_is_not_raised", "custom"])
def test_budgets_of_routers_that_are_not_raised(name: str, tmp_path: Path) -> None:
    """Over two ranks, with loads: as on one."""
    file = tmp_path / "model.py"
    file.write_text(ZOO_MODEL.format(options=ROUTERS[name]) if name in ROUTERS else CUSTOM.read_text())
    logs = []
    for mesh, processes, options in (("dp=1", 1, {}), ("ep=2", 2, {"expert_budget": 2.0}), ("fsdp=2,ep=fsdp", 2, {})):
        package = tmp_path / mesh.replace("=", "_")
        package_of(file, package, mesh=mesh, expert_load=True, router_loss_counts="local", **options)
        ended = run(*command(package, tmp_path / f"{package.name}-run", processes, "--steps", "2", "--accumulate", "2"))
        assert ended.returncode == 0, ended.stderr
        lines = (tmp_path / f"{package.name}-run" / "log.jsonl").read_text().splitlines()
        logs.append([json.loads(line)["expert_load"] for line in lines if "expert_load" in line])
    assert len(logs[0]) == 2 and logs[0] == logs[1] == logs[2]


@pytest.mark.parametrize("options", [{"groups": ("*embed*: frozen",)}, {"lora": ("*.q: rank=4",)}])
def test_layers_with_functions_of_their_own_count(options: dict[str, Any], tmp_path: Path) -> None:
    """A first layer that needs no gradient of its input, or less, has a copy of the function that others share."""
    package = load_package(build("moe-tiny-grouped", tmp_path, expert_load=True, **options).path, "cpu")
    assert [layer["layer"].split(".")[1] for layer in package.manifest["expert_loads"]] == ["0", "1"]
    state = create_state(package.state_specs, 3, "cpu")
    tokens, labels = torch.randint(0, 256, (2, 2, 8))
    package.call("microbatch", state, tokens, labels)
    assert [int(t.sum()) for n, t in state.items() if n.endswith(".load")] == [32, 32]


def test_a_package_without_counts_nothing(tmp_path: Path) -> None:
    package = load_package(build("moe-tiny", tmp_path).path, "cpu")
    assert "expert_loads" not in package.manifest
    assert not any(spec.name.endswith(".load") for spec in package.state_specs)


@pytest.mark.full
def test_the_log_of_two_ranks_equals_that_of_one(tmp_path: Path) -> None:
    """In the file and in the line of a step; over dp and over ep."""
    logs = []
    for name, mesh, processes in (("one", "dp=1", 1), ("dp", "dp=2", 2), ("ep", "ep=2", 2)):
        options = {"mesh": mesh, "expert_load": True, "router_loss_counts": "local"}
        built = build("moe-tiny-capacity", tmp_path / name, **options)
        ended = run(*command(built.path, tmp_path / f"{name}-run", processes, "--steps", "3", "--accumulate", "2"))
        assert ended.returncode == 0, ended.stderr
        assert "experts up to " in ended.stderr
        assert "% dropped" in ended.stderr
        lines = (tmp_path / f"{name}-run" / "log.jsonl").read_text().splitlines()
        logs.append([r for r in map(json.loads, lines) if "loss" in r])
    for record, *others in zip(*logs, strict=True):
        assert set(record["expert_load"]) == {f"layers.{i}.ffn.router.proj" for i in range(2)}
        assert 0 < record["expert_dropped"] < 0.5
        for other in others:
            for field in ("expert_load", "expert_imbalance", "expert_dropped"):
                assert other[field] == record[field]


@pytest.mark.parametrize("model", ["dense-tiny"])
def test_no_router_is_an_error(model: str, tmp_path: Path) -> None:
    recipe = Recipe(model=model, output=str(tmp_path / "out"), arch="none", expert_load=True)
    with pytest.raises(PassError, match="the model has no experts whose loads could be told"):
        compile_package(recipe)
    assert not (tmp_path / "out").exists()
