"""Counted bytes: of a step over a group that sends nothing, those of the graph; of tokens, one row for each rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from mgraph.cli.snapshots import open_package
from mgraph.compiler import compile_package
from mgraph.ir.collectives import CollectiveOrder, message_bytes
from mgraph.ir.dims import evaluate
from mgraph.recipe import Recipe
from mgraph.runtime import mesh, traffic
from mgraph.runtime.package import load_package
from mgraph.runtime.state import create_state

BATCH, SEQUENCE, RANKS, LAYERS = 2, 12, 2, 2
TOKENS = BATCH * SEQUENCE


@pytest.fixture
def two_ranks() -> Iterator[mesh.Mesh]:
    """The first of two ranks, of which the other says nothing: what it would send is whatever lies in memory."""
    before = mesh._current
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    device = torch.device("cpu")
    mesh._current = mesh.Mesh(
        0, RANKS, device, {"ep": RANKS}, init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",))
    )
    yield mesh._current
    mesh._current = before
    dist.destroy_process_group()


@pytest.mark.parametrize(("dispatch", "chunks"), [("alltoall", 1), ("alltoall", 2), ("allgather", 1)])
def test_a_microbatch_sends_what_its_graph_says(
    dispatch: str, chunks: int, two_ranks: mesh.Mesh, tmp_path: Path
) -> None:
    recipe = Recipe(
        model="moe-tiny",
        mesh="ep=2",
        arch="none",
        dispatch=dispatch,
        ep_chunks=chunks,
        output=str(tmp_path / "package"),
    )
    compile_package(recipe)
    package = load_package(tmp_path / "package", "cpu")
    state = create_state(package.state_specs, 0, torch.device("cpu"), mesh=two_ranks)
    tokens = torch.randint(0, 256, (BATCH, SEQUENCE))
    with traffic.counted() as found:
        package.call("microbatch", state, tokens, tokens)
    order = CollectiveOrder(open_package(tmp_path / "package").snapshots[-1].module)
    expected: Counter[tuple[str, str]] = Counter()
    for run in order.runs("microbatch"):
        size = evaluate(message_bytes(order, run.issued), {"B": BATCH, "S": SEQUENCE})
        expected[run.issued.kind, run.issued.axis] += run.times * size
    assert found.bytes == expected
    # A token has one row for each rank, however many of its two experts are there: x, weights and choices on their way
    # there, what the experts give back; backward the gradients of both.
    width, choices = 64, 2
    row = 4 * width + (4 + 8) * choices, 4 * width, 4 * width, 4 * width + 4 * choices
    assert sum(found.bytes.values()) == LAYERS * RANKS * TOKENS * sum(row)
    assert sum(found.calls.values()) == LAYERS * chunks * len(row)


def test_nothing_is_counted_outside() -> None:
    with traffic.counted() as found, traffic.counted() as inner:
        traffic.note("all_gather", "dp", [torch.zeros(3)], 4)
    traffic.note("all_reduce", "dp", [torch.zeros(3)], 4)
    assert found.bytes == inner.bytes == {("all_gather", "dp"): 48}
