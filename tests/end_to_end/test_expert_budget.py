"""Experts within a budget of rows: less memory, the same numbers, and an error where tokens find no room.

That numbers are the same, with every model and mesh, is in test_mesh_table.py.
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mgraph.codegen.memory import RankMemory
from mgraph.compiler import build_module
from mgraph.errors import PassError
from mgraph.ir.dims import Extent, evaluate
from mgraph.ir.graph import Module
from mgraph.ir.ops.expert_exchange import room
from mgraph.passes.activations import extents
from mgraph.recipe import Recipe
from tests.end_to_end.builds import build
from tests.end_to_end.meshes import Ranks, initial_state, steps_of
from tests.end_to_end.test_runs import command, run


def recipe(**changes: Any) -> Recipe:
    return Recipe(model="moe-tiny-losses", mesh="ep=4", arch="none", **changes)


@functools.cache
def module_of(budget: float) -> Module:
    return build_module(recipe(expert_budget=budget)).module


def test_rows_have_room_by_the_budget() -> None:
    """Two experts a token: in balance a rank gets at most 2/4 of each rank's tokens."""
    for budget, part in ((1.0, 0.5), (1.5, 0.75)):
        dim = module_of(budget).dims["R"]
        assert dim.extent is Extent.BUDGET
        for b, s in ((1, 2), (3, 5), (2, 12)):
            assert evaluate(dim.bound, {"B": b, "S": s}) == 4 * math.ceil(part * b * s)
    assert [room(7, p) for p in (0.1, 0.5, 1.0)] == [1, 4, 7]


def test_what_finds_no_room_is_counted_by_layer_and_rank() -> None:
    """Against what each rank's own choices say, over two microbatches."""
    alone = build_module(Recipe(model="moe-tiny-losses", mesh="dp=1", arch="none", disable="data-parallel")).module
    module = build_module(recipe(expert_budget=0.25)).module
    more = [n for n in module.state if n.endswith(".overrun")]
    assert more == [f"layers.{i}.ffn.router.proj.weight.overrun" for i in range(2)]
    state = {**initial_state(alone), **{n: torch.zeros(4, dtype=torch.int64) for n in more}}
    ranks, wanted = Ranks(module, {"ep": 4}, state), torch.zeros(2, 4, dtype=torch.int64)
    chosen: list[list[torch.Tensor]] = []

    def watch(function: Any, node: Any, operands: Any, results: Any) -> None:
        if node.op == "expert_places" and node.phase.value == "forward":
            chosen.append([torch.as_tensor(places) for places in results[0]])

    ranks.margins = watch  # type: ignore[assignment]
    for batches in steps_of(module, 4, 1)[0]:
        chosen.clear()
        ranks.run_batches("microbatch", 0, batches)
        for layer, places in enumerate(chosen[:2]):
            wanted[layer] += torch.tensor([int((own >= math.ceil(0.125 * own.shape[0])).sum()) for own in places])
    told = ranks.finish()["expert_overruns"]
    assert told.view(2, 4).tolist() == wanted.tolist()
    assert wanted.any()


def test_memory_is_less() -> None:
    sizes = []
    for budget in (0.0, 1.0, 1.5):
        module = module_of(budget)
        memory = RankMemory(module, extents(module, {"B": 4, "S": 256}), {"ep": 4})
        sizes.append(memory.entry("microbatch").bytes)
    assert sizes[1] < sizes[2] < sizes[0]


def test_a_budget_of_all_tokens_to_all_ranks_is_refused() -> None:
    with pytest.raises(PassError, match="a budget is for tokens that go to some ranks alone"):
        build_module(recipe(expert_budget=1.5, dispatch="allgather"))


@pytest.mark.full
def test_a_run_without_room_ends_with_an_error(tmp_path: Path) -> None:
    """It names the layer and the rank; nothing of the step is logged or saved. With room it trains as ever."""
    losses = []
    for budget in (0.0, 1.0, 0.3):
        built = build("moe-tiny-losses", tmp_path / str(budget), mesh="ep=2", expert_budget=budget)
        out = tmp_path / f"run-{budget}"
        ended = run(*command(built.path, out, 2, "--steps", "3"))
        if budget == 0.3:
            assert ended.returncode != 0
            assert "step 1: tokens found no room on their way to experts: " in ended.stderr
            assert "of rank 0 of ep in layers.0.ffn.router.proj" in ended.stderr
            assert "--expert-budget" in ended.stderr
            assert not (out / "log.jsonl").exists() or "loss" not in (out / "log.jsonl").read_text()
            assert not list(out.glob("checkpoint*/*"))
        else:
            assert ended.returncode == 0, ended.stderr
            lines = map(json.loads, (out / "log.jsonl").read_text().splitlines())
            losses.append([r["loss"] for r in lines if "loss" in r])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
