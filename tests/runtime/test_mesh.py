"""Axes bound to processes. The start-up handshake is in test_handshake, collectives on real processes in test_v1."""

from __future__ import annotations

import math

import pytest
import torch

from mgraph.runtime.handshake import MeshError
from mgraph.runtime.mesh import Mesh, bind_axes, choose_device
from tests.runtime.resharding import Part

CPU = torch.device("cpu")


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
    with pytest.raises(MeshError, match="unknown device 'tpu'") as caught:
        choose_device("tpu")
    assert caught.value.where == "--device" and caught.value.hint == "did you mean 'cpu'?"
    with pytest.raises(MeshError, match="no CUDA device"):
        choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert choose_device("auto") == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(MeshError, match="process 2 of this machine has no GPU of its own: there are 2"):
        choose_device("cuda")


@pytest.mark.parametrize("axes", [{"dp": 4}, {"fsdp": 4}, {"dp": 2, "fsdp": 2}, {"dp": 2, "fsdp": 2, "tp": 2}])
def test_data_ranks_are_the_same_however_the_data_axes_are_cut(axes: dict[str, int]) -> None:
    """So each of them sees the same microbatches. What comes after the data axes shares a data rank."""
    world = math.prod(axes.values())
    meshes = [Part(rank, world, CPU, axes) for rank in range(world)]
    assert [here.data_rank for here in meshes] == [rank * 4 // world for rank in range(world)]
    assert {here.data_size for here in meshes} == {4}


def test_single_process() -> None:
    here = Mesh(0, 1, CPU, {"dp": 1})
    assert (here.data_rank, here.data_size) == (0, 1)
    assert here.gather(5) == [5] and here.largest(3) == 3 and here.together(lambda: "x") == "x"
    here.agree({"any": "fact"})
    assert here.is_first and here.index("dp") == 0 and here.size("dp") == here.size("tp") == 1
