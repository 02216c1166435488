"""The way to the experts on one rank: nothing changes but the ops; that gradients go the same way is checked too."""

from __future__ import annotations

from typing import Any

import torch

from mgraph.compiler import build_module
from mgraph.ir.dims import Extent, symbol
from mgraph.ir.graph import Module
from mgraph.recipe import Recipe
from tests.end_to_end.meshes import Ranks, initial_state, steps_of


def before_sharding(mesh: str, model: str = "moe-tiny", **options: Any) -> Module:
    """The training graph of one rank that the passes of a mesh begin with."""
    done = build_module(Recipe(model=model, mesh=mesh, arch="none", **options))
    return done.snapshots.snapshots[[result.name for result in done.results].index("adamw") + 1].module


def test_one_rank_computes_what_it_did() -> None:
    before, after = before_sharding("dp=1", "moe-tiny-losses"), before_sharding("ep=2", "moe-tiny-losses")
    ops = {node.op for _, node in after.walk()}
    assert {"expert_send", "expert_return"} <= ops
    combines = [n for _, n in after.walk() if n.op.startswith("moe_combine")]
    assert combines and all(n.operands[-1].name.startswith("offsets") for n in combines)
    dispatches = [n for _, n in after.walk() if n.op in ("moe_dispatch", "moe_dispatch_grad")]
    assert dispatches and all(n.attrs["others"] for n in dispatches)
    made = []
    for module in (before, after):
        ranks = Ranks(module, {}, initial_state(before))
        batches = steps_of(before, 1, 1)[0][0]
        outputs = ranks.run_batches("microbatch", 0, batches)[0]
        made.append({**outputs, **{n: ranks.held[0][n] for n in before.state if n.endswith(".grad")}})
    for name, tensor in made[0].items():
        assert torch.equal(tensor, made[1][name]), name


def test_chunks_are_parts_of_the_sequences() -> None:
    """Each has a way of its own, all of one ragged dim; the number must divide what a sequence may have."""
    module = before_sharding("ep=2", ep_chunks=3)
    assert [fact.text for fact in module.facts] == ["S % 3 == 0"]
    assert module.dims["R"].bound == symbol("B") * symbol("S") / 3 and "R1" not in module.dims
    layer = module.functions["layer.fwd"]
    ops = [node.op for node in layer.nodes]
    assert [ops.count(op) for op in ("split_rows", "join_rows", "moe_dispatch", "expert_send")] == [3, 1, 3, 3]


def test_rows_are_of_a_ragged_dim() -> None:
    module = before_sharding("ep=2", "moe-tiny-losses")
    dim = module.dims["R"]
    assert (dim.bound, dim.extent) == (symbol("B") * symbol("S"), Extent.BOUND)
    for _, node in module.walk():
        if node.op == "moe_dispatch":
            assert node.results[0].tensor.shape[0] == 2 * symbol("R")
        if node.op == "expert_return":
            assert all(v.tensor.shape[0] == dim.bound for v in node.results)


def test_exact_rows_are_of_a_ragged_dim_for_each_way() -> None:
    """The host reads each; sizes are made once, and handed to the backward."""
    module = before_sharding("ep=2", expert_extent="host", ep_chunks=2)
    assert {module.dims[name].extent for name in ("R", "R1")} == {Extent.HOST}
    sizes = [(function.name, node) for function, node in module.walk() if node.op == "expert_sizes"]
    assert [name for name, _ in sizes] == ["layer", "layer", "layer.fwd", "layer.fwd"]
    ways = [node for _, node in module.walk() if node.op in ("expert_send", "expert_return")]
    assert all(node.attrs["exact"] for node in ways)
    assert {node.operands[-2].tensor.shape for node in ways} == {node.result.tensor.shape for _, node in sizes}
    assert len({node.attrs["rows"] for node in ways}) == 2
