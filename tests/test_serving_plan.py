"""The CUDA graphs of what is served, within a budget: what they take is counted, and no other choice pads less."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from mgraph.cli import memory
from mgraph.codegen.buckets import Bucket, match
from mgraph.compiler import build_module, compile_package
from mgraph.errors import OptionError
from mgraph.ir.graph import Module
from mgraph.recipe import Recipe
from mgraph.runtime.serving import package_stepper
from mgraph.runtime.serving.dispatch import TEXTS
from mgraph.runtime.serving.package_stepper import PackageStepper
from mgraph.runtime.serving.scheduler import most_rows
from mgraph.serving_plan import LONGEST_TEXT, STEP_TOKENS, ServingPlan, serving_plan

SETTINGS: dict[str, Any] = {"model": "dense-tiny", "purpose": "serve", "arch": "none", "max_length": 64}
WORKLOAD = {(1, 1): 5.0, (3, 3): 2.0, (7, 7): 4.0, (40, 2): 1.0, (100, 3): 2.0, (120, 1): 0.5, (400, 5): 0.25}


@pytest.fixture(scope="module")
def module() -> Module:
    return build_module(Recipe(**SETTINGS)).module


@pytest.fixture
def workload(tmp_path: Path) -> str:
    file = tmp_path / "workload.json"
    file.write_text(json.dumps([[t, r, w] for (t, r), w in WORKLOAD.items()]))
    return str(file)


def planned(module: Module, budget: int = 0, **settings: Any) -> ServingPlan:
    return serving_plan(Recipe(**SETTINGS | {"memory_budget": f"{budget}B" if budget else ""} | settings), module)


def padding(buckets: tuple[Bucket, ...]) -> float:
    """Expected padding; infinite where a step fits no bucket."""
    found = [(tokens, weight, match(buckets, tokens, requests)) for (tokens, requests), weight in WORKLOAD.items()]
    return sum(float("inf") if b is None else weight * (b.tokens - tokens) for tokens, weight, b in found)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_no_other_graphs_within_the_budget_pad_less(module: Module, workload: str, count: int) -> None:
    free = planned(module, graph_workload=workload).memory
    fixed = free.total - free.graphs * free.graph
    budget = fixed + count * free.graph + free.graph // 2
    found = planned(module, budget, graph_workload=workload)
    assert found.memory.graphs == len(found.buckets.buckets) == count and found.memory.total <= budget
    possible = [Bucket(n, n, True) for n in (1, 3, 7)] + [Bucket(n, 128, False) for n in (40, 100, 120, 400)]
    every = itertools.combinations(possible, count)
    assert padding(found.buckets.buckets) == pytest.approx(min(padding(tuple(sorted(c))) for c in every))
    real = sum(tokens * weight for (tokens, _), weight in WORKLOAD.items())
    assert found.buckets.waste == pytest.approx(1 - real / (real + padding(found.buckets.buckets)))
    assert (
        f"{count} graphs of up to 400 tokens" in found.lines()[0] and "100.0% of the expected steps" in found.lines()[0]
    )


@pytest.mark.parametrize("policy", ["linear", "exponential"])
def test_lists_of_sizes_keep_within_the_budget(module: Module, policy: str) -> None:
    free = planned(module, graph_policy=policy).memory
    for count in (1, 2, 9, 15, 17):
        budget = free.total - (free.graphs - count) * free.graph
        found = planned(module, budget, graph_policy=policy)
        assert found.memory.graphs == len(found.buckets.buckets) > 0 and found.memory.total <= budget


def test_what_the_budget_leaves_is_the_cache(module: Module) -> None:
    free = planned(module).memory
    budget = free.total + 10 * free.cache // free.blocks + 1
    assert planned(module, budget).memory.blocks == free.blocks + 10
    assert free.blocks == 1 + 64 // 16 and planned(module, budget).memory.graphs == 24
    few = free.total - free.graphs * free.graph - free.pool - free.logits
    without = planned(module, few)
    assert without.memory.graphs == 0 and without.lines()[0] == "no step is a graph"
    with pytest.raises(OptionError, match=r"needs at least .*: weights .*, a step of 2048 tokens .*, a cache for one"):
        planned(module, few - 1)


def test_smaller_graphs_where_the_largest_do_not_fit(module: Module) -> None:
    free = planned(module).memory
    budget = free.total - free.graphs * free.graph - free.pool // 20
    found = planned(module, budget)
    assert 0 < found.buckets.buckets[-1].tokens < 512 and found.memory.pool < free.pool
    assert found.memory.total <= budget and 0 < found.buckets.captured < 1


def test_steps_that_only_large_graphs_hold(module: Module, tmp_path: Path) -> None:
    file = tmp_path / "large.json"
    for tokens, graphs in ((400, 1), (4000, 0)):
        file.write_text(json.dumps([[tokens, 5, 1]]))
        free = planned(module, graph_workload=str(file))
        assert free.memory.graphs == graphs and free.buckets.captured == graphs
        least = planned(module, free.memory.total - free.memory.pool, graph_workload=str(file))
        assert least.memory.graphs == 0 and least.buckets.buckets == ()


def test_the_server_has_what_was_planned(module: Module, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    free = planned(module).memory
    budget = free.total + 3 * free.cache // free.blocks
    path = compile_package(Recipe(**SETTINGS, memory_budget=f"{budget}B", output=str(tmp_path / "package"))).package
    assert path is not None
    stepper = PackageStepper(path)
    assert stepper.num_blocks == free.blocks + 3 and free.cache == free.blocks * stepper.block_bytes
    held = [tensor.nbytes for name, tensor in stepper.state.items() if not name.startswith("cache.")]
    assert free.weights == sum(held)
    assert ServingPlan.of(stepper.package.manifest["graph_plan"]) == planned(module, budget)
    memory.run(path, 0, 0, 0, "", 1, "text")
    assert planned(module, budget).lines()[1] in capsys.readouterr().out
    memory.run(path, 0, 0, 0, "", 1, "json")
    told, plan = json.loads(capsys.readouterr().out)["serving"], planned(module, budget)
    assert ServingPlan.of(told) == plan and told["total"] == plan.memory.total <= budget


def test_windows_need_no_cache_beyond_them(tmp_path: Path) -> None:
    """One layer of two has a window of 9: the longest text has 4 blocks in the other and at most 2 in this, and a block
    is of one layer at a time."""
    recipe = Recipe(**SETTINGS | {"model": "gpt-oss-tiny"}, output=str(tmp_path / "package"))
    found = compile_package(recipe)
    assert found.package is not None
    plan, stepper = serving_plan(recipe, found.module).memory, PackageStepper(found.package, num_blocks=20)
    assert stepper.windows == (None, 9) and plan.blocks == 1 + 4 + 2 and plan.cache == 7 * stepper.block_bytes
    caches = {t.data_ptr(): t.nbytes for name, t in stepper.state.items() if name.startswith("cache.")}
    assert len(caches) == 2 and sum(caches.values()) == 20 * stepper.block_bytes


def test_ranks_share_what_they_need() -> None:
    alone, shared = (
        serving_plan(recipe, build_module(recipe).module).memory
        for recipe in (Recipe(**SETTINGS), Recipe(**SETTINGS, mesh="tp=2"))
    )
    assert shared.cache == alone.cache // 2 and alone.weights / 2 < shared.weights < 0.6 * alone.weights


def test_bounds_are_those_of_the_server() -> None:
    assert STEP_TOKENS == package_stepper.MAX_TOKENS and TEXTS[-1] == LONGEST_TEXT


def test_sums_of_attention_over_fixed_runs_are_counted(module: Module) -> None:
    """Of 2048 tokens, 4 heads of 16 numbers each with two sums: 64 tokens are one run."""
    plain, fixed = (planned(module, arch="sm_90a", batch_invariant=fixed).memory for fixed in (False, True))
    assert fixed.steps - plain.steps == STEP_TOKENS * 4 * (16 + 2) * 4


def test_what_torch_needs_besides_is_counted_where_it_runs(module: Module) -> None:
    """Kernels sample in the memory of scores, keys and what is left of these; torch draws and sorts in more."""
    by_torch, by_kernels = (planned(module, arch=arch).memory for arch in ("none", "sm_90a"))
    assert by_kernels.pool < by_torch.pool and by_kernels.steps < by_torch.steps
    assert by_kernels.steps > 3 * most_rows(package_stepper.MAX_REQUESTS) * 256 * 4
