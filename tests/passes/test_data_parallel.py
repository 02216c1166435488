"""The reduction over a data axis, and where every value lies; the numbers on several ranks are in test_adamw.py."""

from __future__ import annotations

import pytest
import torch

from mgraph.errors import PassError
from mgraph.ir.graph import Module
from mgraph.ir.interpreter import run_ranks
from mgraph.ir.types import Partial, Shard
from mgraph.ir.verifier import verify
from mgraph.passes.adamw import AdamW
from mgraph.passes.autodiff import Autodiff
from mgraph.passes.base import Report
from mgraph.passes.data_parallel import DataParallel
from mgraph.passes.pipeline import run_pipeline
from tests.passes.models import mlp_module, random_batch, random_state


def trained() -> Module:
    return AdamW().run(Autodiff().run(mlp_module(), Report()), Report())


def test_finish_begins_with_one_reduction_of_all_accumulators() -> None:
    report = Report()
    module = DataParallel().run(trained(), report)
    verify(module)
    nodes = module.functions["finish"].nodes
    assert [n.op for n in nodes[:3]] == ["all_reduce_start", "wait", "global_norm"]
    reduced = {v.name for v in nodes[0].operands}
    assert reduced == {n for n in module.state if n.endswith(".grad")} | {"acc.loss_sum", "acc.count"}
    assert report.matches[0].detail == f"{len(reduced)} accumulators summed over dp as one bucket"
    totals = set(nodes[1].results)
    for node in nodes[2:]:
        read = {v.name for v in node.operands if v.is_state} & reduced
        assert node.op == "zero" or not read, node
    assert totals & {v for n in nodes[2:] for v in n.operands}


def test_placements() -> None:
    module = DataParallel("data", 4).run(trained(), Report())
    (axis,) = module.mesh
    assert (axis.name, axis.size) == ("data", 4)
    microbatch = module.entry_function("microbatch")
    assert [p.tensor.on("data") for p in microbatch.params] == [Shard(0), Shard(0)]
    assert module.state["embed"].type.on("data") is None
    assert module.state["embed.m"].type.on("data") is None
    assert module.state["embed.grad"].type.on("data") == Partial("sum") == module.state["acc.count"].type.on("data")
    layer = module.functions["layer.fwd"]
    assert layer.params[0].tensor.on("data") == Shard(0)
    losses = [v for n in microbatch.nodes for v in n.results if v.name in ("loss_sum", "count")]
    assert [v.tensor.on("data") for v in losses] == [Partial("sum")] * 2
    open_axis = DataParallel().run(trained(), Report()).mesh[0]
    assert (open_axis.name, open_axis.size) == ("dp", None)


def test_one_rank_that_is_not_finite_stops_all() -> None:
    module = DataParallel().run(trained(), Report())
    states = [random_state(module) for _ in range(2)]
    batches = [random_batch(seed=i) for i in range(2)]
    _, new = run_ranks(module, "microbatch", batches, states, {"dp": 2})
    states = [{**s, **n} for s, n in zip(states, new, strict=True)]
    states[1]["embed.grad"][0, 0] = torch.nan
    outputs, after = run_ranks(module, "finish", [{"lr": torch.tensor(0.1)}] * 2, states, {"dp": 2})
    assert [int(o["skipped"]) for o in outputs] == [1, 1]
    for state, updated in zip(states, after, strict=True):
        assert all(torch.equal(updated[n], state[n]) for n in ("embed", "embed.m", "embed.v", "step"))


def test_it_needs_the_training_entries_and_runs_once_an_axis() -> None:
    with pytest.raises(PassError, match="requires the property"):
        run_pipeline(mlp_module(), "data-parallel")
    with pytest.raises(PassError, match="the mesh has an axis dp already"):
        run_pipeline(mlp_module(), "autodiff,adamw,data-parallel,data-parallel")
    two, _ = run_pipeline(mlp_module(), "autodiff,adamw,data-parallel,data-parallel{axis=other}")
    verify(two)
    assert two.state["embed.grad"].type.placement == (("dp", Partial("sum")), ("other", Partial("sum")))
