"""The way to the experts on one rank: nothing changes but the ops; that gradients go the same way is checked too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mgraph.compiler import build_module
from mgraph.errors import MgraphError
from mgraph.ir.dims import Extent, symbol
from mgraph.ir.graph import Module
from mgraph.recipe import Recipe
from tests.end_to_end.meshes import Ranks, initial_state, steps_of


def compiled(mesh: str, disable: str) -> Module:
    recipe = Recipe(model="moe-tiny-losses", mesh=mesh, arch="none", disable=disable)
    return build_module(recipe).module


def test_one_rank_computes_what_it_did() -> None:
    before, after = compiled("dp=1", ""), compiled("ep=1", "")
    ops = {node.op for _, node in after.walk()}
    assert {"expert_send", "expert_return"} <= ops
    combines = [n for _, n in after.walk() if n.op.startswith("moe_combine")]
    assert combines and all(n.operands[-1].name.startswith("offsets") for n in combines)
    dispatches = [n for _, n in after.walk() if n.op in ("moe_dispatch", "moe_dispatch_grad")]
    assert dispatches and all(n.attrs["others"] for n in dispatches)
    made = []
    for module in (before, after):
        ranks = Ranks(module, {axis.name: 1 for axis in module.mesh}, initial_state(before))
        batches = steps_of(before, 1, 1)[0][0]
        outputs = ranks.run_batches("microbatch", 0, batches)[0]
        made.append({**outputs, **{n: ranks.held[0][n] for n in before.state if n.endswith(".grad")}})
    for name, tensor in made[0].items():
        assert torch.equal(tensor, made[1][name]), name


def test_chunks_are_parts_of_the_sequences() -> None:
    """Each has a way of its own, all of one ragged dim; the number must divide what a sequence may have."""
    recipe = Recipe(model="moe-tiny", mesh="ep=1", arch="none", ep_chunks=3)
    module = build_module(recipe).module
    assert [fact.text for fact in module.facts] == ["S % 3 == 0"]
    assert module.dims["R"].bound == symbol("B") * symbol("S") / 3 and "R1" not in module.dims
    layer = module.functions["layer.fwd"]
    ops = [node.op for node in layer.nodes]
    assert [ops.count(op) for op in ("split_rows", "join_rows", "moe_dispatch", "expert_send")] == [3, 1, 3, 3]


def test_own_tokens_go_nowhere() -> None:
    """They have a way of their own, of as many rows as there are choices; one rank has no others."""
    recipe = Recipe(model="moe-tiny", mesh="ep=2", arch="none", ep_own_first=True)
    layer = build_module(replace(recipe, disable="expert-parallel,overlap-experts")).module.functions["layer.fwd"]
    (parted,) = [node for node in layer.nodes if node.op == "part_choices"]
    near, far = [node for node in layer.nodes if node.op == "moe_dispatch"]
    assert near.operands[1] is parted.results[0] and near.results[0].tensor.shape[0] == 2 * symbol("B") * symbol("S")
    assert far.results[0].tensor.shape[0] == 2 * symbol("R")
    (sent,) = [node for node in layer.nodes if node.op == "expert_send"]
    assert sent.operands[-1] is parted.results[1]
    layer = build_module(recipe).module.functions["layer.fwd"]
    own = [node for node in layer.nodes if node.op == "own_choices"]
    assert len(own) == 2 and [node.op for node in layer.nodes].count("far_choices") == 1
    alone = build_module(replace(recipe, mesh="ep=1")).module
    assert not any(node.op == "part_choices" for _, node in alone.walk())


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"ep_chunks": 2}, "a rank's own tokens come first"),
        ({"mesh": "dp=2"}, "ep_own_first"),
    ],
)
def test_own_first_refuses(options: dict[str, Any], error: str) -> None:
    given: dict[str, Any] = {"model": "moe-tiny", "mesh": "ep=2", "arch": "none", "ep_own_first": True, **options}
    with pytest.raises(MgraphError) as caught:
        build_module(Recipe(**given))
    assert error in str(caught.value).replace("-", "_") or error in str(caught.value)


def test_rows_are_of_a_ragged_dim() -> None:
    module = compiled("ep=1", "")
    dim = module.dims["R"]
    assert (dim.bound, dim.extent) == (symbol("B") * symbol("S"), Extent.BOUND)
    for _, node in module.walk():
        if node.op == "moe_dispatch":
            assert node.results[0].tensor.shape[0] == 2 * symbol("R")
        if node.op == "expert_return":
            assert all(v.tensor.shape[0] == dim.bound for v in node.results)


def test_exact_rows_are_of_a_ragged_dim_for_each_way() -> None:
    """The host reads each; sizes are made once, and handed to the backward."""
    recipe = Recipe(model="moe-tiny", mesh="ep=1", arch="none", expert_extent="host", ep_chunks=2)
    module = build_module(recipe).module
    assert {module.dims[name].extent for name in ("R", "R1")} == {Extent.HOST}
    sizes = [(function.name, node) for function, node in module.walk() if node.op == "expert_sizes"]
    assert [name for name, _ in sizes] == ["layer", "layer", "layer.fwd", "layer.fwd"]
    ways = [node for _, node in module.walk() if node.op in ("expert_send", "expert_return")]
    assert all(node.attrs["exact"] and node.operands[-2].tensor.shape == (2, 1) for node in ways)
    assert len({node.attrs["rows"] for node in ways}) == 2
