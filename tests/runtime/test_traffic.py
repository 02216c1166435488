"""Counted bytes: of a step over a group that sends nothing, those of the graph; of tokens, one row for each rank that
has an expert of theirs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from mgraph.cli.snapshots import open_package
from mgraph.compiler import compile_package
from mgraph.ir.collectives import CollectiveOrder, message_bytes
from mgraph.ir.dims import evaluate
from mgraph.recipe import Recipe
from mgraph.runtime import mesh, traffic
from mgraph.runtime.package import Package, State, load_package
from mgraph.runtime.state import create_state

BATCH, SEQUENCE, RANKS, LAYERS = 2, 12, 2, 2
TOKENS = BATCH * SEQUENCE
WIDTH, CHOICES, EXPERTS = 64, 2, 4
"""Of moe-tiny: columns, experts a token, and experts of a rank."""
ROW = 4 * WIDTH + (4 + 8) * CHOICES, 4 * WIDTH, 4 * WIDTH, 4 * WIDTH + 4 * CHOICES
"""Bytes of a row: x, weights and choices on their way there, what the experts give back; backward the gradients of
both."""


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


def made(directory: Path, ranks: mesh.Mesh, **options: Any) -> tuple[Package, State]:
    """A package of two ranks that share experts, with these options, and its state at this one."""
    compile_package(Recipe(model="moe-tiny", mesh="ep=2", arch="none", output=str(directory), **options))
    package = load_package(directory, "cpu")
    return package, create_state(package.state_specs, 0, torch.device("cpu"), mesh=ranks)


@pytest.mark.parametrize(("dispatch", "chunks"), [("alltoall", 1), ("alltoall", 2), ("allgather", 1)])
def test_a_microbatch_sends_what_its_graph_says(
    dispatch: str, chunks: int, two_ranks: mesh.Mesh, tmp_path: Path
) -> None:
    package, state = made(tmp_path / "package", two_ranks, dispatch=dispatch, ep_chunks=chunks)
    tokens = torch.randint(0, 256, (BATCH, SEQUENCE))
    with traffic.counted() as found:
        package.call("microbatch", state, tokens, tokens)
    order = CollectiveOrder(open_package(tmp_path / "package").snapshots[-1].module)
    expected: Counter[tuple[str, str]] = Counter()
    for run in order.runs("microbatch"):
        size = evaluate(message_bytes(order, run.issued), {"B": BATCH, "S": SEQUENCE})
        expected[run.issued.kind, run.issued.axis] += run.times * size
    assert found.bytes == expected
    # A token has room for one row at each rank, however many of its two experts are there.
    assert sum(found.bytes.values()) == LAYERS * RANKS * TOKENS * sum(ROW)
    assert sum(found.calls.values()) == LAYERS * chunks * len(ROW)


class Done:
    """Work that has been done when it begins."""

    def wait(self) -> None:
        pass


def mirrored(received: Tensor, sent: Tensor, *sizes: list[int], **options: object) -> Done:
    """Each other rank sends what it is sent."""
    received.copy_(sent)
    return Done()


@pytest.mark.parametrize("chunks", [1, 2])
def test_exact_rows_are_those_of_decisions(
    chunks: int, two_ranks: mesh.Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for each rank at which a token has any expert, counted from what routers chose, and none besides: rows that
    have room for all tokens hide it where a token goes to ranks that it has no expert at."""
    package, state = made(
        tmp_path / "package", two_ranks, expert_extent="host", ep_chunks=chunks, replayable_routing=True
    )
    monkeypatch.setattr(dist, "all_to_all_single", mirrored)
    tokens = torch.randint(0, 256, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(0))
    # Of a token of the first sequence both experts are at one rank, which it says; of the second, at both ranks, but
    # for the last tokens, whose routers choose.
    given = torch.full((BATCH, SEQUENCE, LAYERS, CHOICES), -1, dtype=torch.int16)
    given[0] = EXPERTS * (tokens[0, :, None, None] % RANKS) + torch.tensor([1, 3])
    given[1, :-4] = torch.tensor([2, 6])
    with traffic.counted() as found:
        chosen = package.call("microbatch", state, tokens, tokens, given)["routing"]
    assert torch.equal(chosen[given >= 0], given[given >= 0])
    pairs = sum(len({expert // EXPERTS for expert in own}) for own in chosen.flatten(0, 2).tolist())
    assert LAYERS * (SEQUENCE + 2 * (SEQUENCE - 4) + 4) <= pairs <= LAYERS * (SEQUENCE + 2 * SEQUENCE)
    told = LAYERS * chunks * RANKS * 8  # how many rows there are
    assert found.bytes == {("all_to_all", "ep"): told + pairs * sum(ROW)}


def test_nothing_is_counted_outside() -> None:
    with traffic.counted() as found, traffic.counted() as inner:
        traffic.note("all_gather", "dp", [torch.zeros(3)], 4)
    traffic.note("all_reduce", "dp", [torch.zeros(3)], 4)
    assert found.bytes == inner.bytes == {("all_gather", "dp"): 48}
