"""Loads of experts in the log: those that hooks on the eager model count, over microbatches and ranks."""

from __future__ import annotations

import json
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

CASES: list[tuple[str, dict[str, Any]]] = [
    ("moe-tiny-capacity", {}),
    ("moe-tiny", {"recompute": "full"}),
    ("moe-tiny-grouped", {"expert_bias_rate": 0.01}),
]


def counted(model: Any, tokens: torch.Tensor) -> list[list[int]]:
    """How often the routers of a model choose each expert, by layer."""
    found: list[list[int]] = []

    def count(router: Any, _: Any, made: Any) -> None:
        found.append(made[1].flatten().bincount(minlength=router.config.num_experts + 1)[:-1].tolist())

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


def test_a_package_without_counts_nothing(tmp_path: Path) -> None:
    package = load_package(build("moe-tiny", tmp_path).path, "cpu")
    assert "expert_loads" not in package.manifest
    assert not any(spec.name.endswith(".load") for spec in package.state_specs)


@pytest.mark.full
def test_the_log_of_two_ranks_equals_that_of_one(tmp_path: Path) -> None:
    """In the file and in the line of a step; over dp and over ep."""
    logs = []
    for name, mesh, processes in (("one", "dp=1", 1), ("dp", "dp=2", 2), ("ep", "ep=2", 2)):
        built = build("moe-tiny-capacity", tmp_path / name, mesh=mesh, expert_load=True)
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
    with pytest.raises(PassError, match="the model has no router whose loads could be told"):
        compile_package(recipe)
    assert not (tmp_path / "out").exists()
