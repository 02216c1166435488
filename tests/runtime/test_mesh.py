"""Axes bound to processes, and the start-up handshake. Collectives on real processes are in test_v1."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from mgraph.errors import DataError, MgraphError
from mgraph.runtime.mesh import Mesh, MeshError, bind_axes, choose_device, handshake

CPU = torch.device("cpu")
Prepare = Callable[[], tuple[torch.device, dict[str, int], str]]


def test_open_axis_takes_what_is_left() -> None:
    assert bind_axes({"dp": "*"}, 1) == {"dp": 1}
    assert bind_axes({"dp": "*", "tp": 2}, 8) == {"dp": 4, "tp": 2}
    assert bind_axes({"dp": 2, "tp": 2}, 4) == {"dp": 2, "tp": 2}
    assert bind_axes({}, 1) == {}


@pytest.mark.parametrize(
    ("declared", "world_size", "message"),
    [
        ({"dp": "*", "tp": 2}, 3, r"mesh dp=\*,tp=2 needs a multiple of 2 processes, and 3 were started"),
        ({"dp": 2, "tp": 2}, 8, "mesh dp=2,tp=2 needs 4 processes, and 8 were started"),
        ({"dp": 2}, 1, "mesh dp=2 needs 2 processes, and 1 were started"),
        ({}, 2, "mesh one process needs 1 processes, and 2 were started"),
    ],
)
def test_wrong_world_size(declared: dict[str, int | str], world_size: int, message: str) -> None:
    with pytest.raises(MeshError, match=message):
        bind_axes(declared, world_size)


def test_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("cpu") == choose_device("auto") == CPU
    with pytest.raises(MeshError, match="no CUDA device"):
        choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert choose_device("auto") == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(MeshError, match="process 2 of this machine has no GPU of its own: there are 2"):
        choose_device("cuda")


def outcomes(prepares: list[Prepare]) -> list[str]:
    """What each rank of a handshake ends with: `ok`, or the message of its error."""
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, but not in the stubs

    def rank_outcome(rank: int) -> str:
        try:
            handshake(store, rank, len(prepares), prepares[rank])
        except MgraphError as error:
            return f"{error.message} / {error.hint}"
        return "ok"

    with ThreadPoolExecutor(len(prepares)) as pool:
        return list(pool.map(rank_outcome, range(len(prepares))))


def test_handshake_of_equal_ranks() -> None:
    assert outcomes([lambda: (CPU, {"dp": 3}, "a")] * 3) == ["ok"] * 3


def test_handshake_names_the_ranks_that_differ() -> None:
    fingerprints = ["a", "a", "b", "a", "c"]
    results = outcomes([lambda f=f: (CPU, {"dp": 5}, f) for f in fingerprints])  # type: ignore[misc]
    assert len(set(results)) == 1
    assert results[0].startswith("rank 2, 4 runs another package, runtime or torch than rank 0")


def test_handshake_spreads_an_error_of_one_rank() -> None:
    def fail() -> tuple[torch.device, dict[str, int], str]:
        raise DataError("file missing here", hint="copy it")

    assert outcomes([lambda: (CPU, {"dp": 2}, "a"), fail]) == ["file missing here / copy it"] * 2


def test_single_process() -> None:
    here = Mesh(0, 1, CPU, {"dp": 1})
    assert here.gather(5) == [5] and here.largest(3) == 3 and here.together(lambda: "x") == "x"
    assert here.is_first and here.index("dp") == 0 and here.size("dp") == here.size("tp") == 1
