"""Rows by capacity: their extents, what goes over the axis, and what contradicts itself.

That training goes on as on one device is in tests/end_to_end/test_mesh_table.py and test_expert_routing.py.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest

from mgraph.compiler import build_module
from mgraph.errors import MgraphError
from mgraph.ir.collective_proof import prove
from mgraph.ir.collectives import message_bytes
from mgraph.ir.dims import evaluate
from mgraph.ir.graph import Module
from mgraph.recipe import Recipe
from tests.end_to_end.meshes import Row

EXPERTS, CHOICES, FACTOR, WIDTH = 8, 2, 0.75, 64


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@functools.cache
def compiled(directory: Path, mesh: str) -> Module:
    return build_module(Row("limited-weight", mesh).recipe(directory, pad_to_capacity=True)).module


@pytest.mark.parametrize("mesh", ["dp=1", "ep=2"])
def test_no_extent_depends_on_routers(mesh: str, directory: Path) -> None:
    module = compiled(directory, mesh)
    assert not any(dim.ragged for dim in module.dims.values())
    products = [node for _, node in module.walk() if node.op == "grouped_matmul"]
    assert products and not any(node.op.startswith("moe_dispatch") for _, node in module.walk())
    for b, s in ((1, 2), (3, 5)):
        rows = EXPERTS * math.ceil(b * s * CHOICES * FACTOR / EXPERTS - 1e-9)
        assert all(evaluate(n.operands[0].tensor.shape[0], {"B": b, "S": s}) == rows for n in products)


def test_messages_have_the_rows_of_all_experts(directory: Path) -> None:
    module = compiled(directory, "ep=2")
    order = prove(module)
    layer = next(f for f in order.items if f.endswith(".fwd"))
    sent = [i for i in order.issued if i.function.name == layer and i.axis == "ep"]
    assert [i.kind for i in sent] == ["all_to_all", "all_to_all"]
    rows = EXPERTS * math.ceil(2 * 12 * CHOICES * FACTOR / EXPERTS)
    assert [evaluate(message_bytes(order, i), {"B": 2, "S": 12}) for i in sent] == [rows * WIDTH * 4] * 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"expert_budget": 1.5}, "rows of which there could be too many"),
        ({"dispatch": "allgather"}, "rows by capacity go to the ranks of their experts alone"),
        ({"expert_extent": "host"}, "rows by capacity go in one message of a known size"),
        ({"ep_chunks": 2}, "rows by capacity go in one message of a known size"),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], said: str, directory: Path) -> None:
    with pytest.raises(MgraphError, match=said) as caught:
        build_module(Row("limited-weight", "ep=2").recipe(directory, pad_to_capacity=True, **options))
    assert caught.value.exit_code == 2 and caught.value.hint
    assert "or --pad-to-capacity" not in caught.value.hint  # it is given


@pytest.mark.parametrize(
    ("model", "said"),
    [("moe-tiny", "the experts of layers.* have no capacity"), ("dense-tiny", "no experts that could have a capacity")],
)
def test_a_model_without_a_capacity_is_refused(model: str, said: str) -> None:
    with pytest.raises(MgraphError, match=said) as caught:
        build_module(Recipe(model=model, mesh="dp=1", arch="none", pad_to_capacity=True))
    assert "capacity_factor" in str(caught.value.hint)


@pytest.mark.full
def test_every_step_of_the_way_is_verified(directory: Path) -> None:
    results = build_module(Row("limited-weight", "ep=2").recipe(directory, pad_to_capacity=True, verify=True)).results
    found = {r.name: r.measured["verify"] for r in results}
    assert "checked with expert-parallel" in found.pop("data-parallel")["why"]
    assert {measured["status"] for measured in found.values()} == {"verified"}
    assert max(found[name]["error"] for name in ("pad-to-capacity", "expert-parallel")) <= 1e-9


ROUTER = """
import torch
from torch import nn
from mgraph import models
from mgraph.models.capacity import within_capacity
from mgraph.models.custom_router import use_router

class Limited(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.proj = nn.Linear(config.d_model, config.num_experts)

    def forward(self, x):
        weights, experts = self.proj(x).softmax(-1).topk(2, -1)
        return within_capacity(weights, experts, 8, 0.75, "weight")

def made():
    return use_router(models.get("moe", "tiny"), Limited)
"""


@pytest.mark.parametrize("packed", [False, True])
def test_capacities_of_other_routers_are_found(packed: bool, tmp_path: Path) -> None:
    """Behind them those that do not know of padding have it dropped."""
    file = tmp_path / "own.py"
    file.write_text(ROUTER)
    module = build_module(Recipe(model=f"{file}:made", packed=packed, pad_to_capacity=True, arch="none")).module
    ops = [node.op for _, node in module.walk()]
    assert "padded_dispatch" in ops and "moe_dispatch" not in ops
    assert ("moe_drop_padding" in ops) == packed
