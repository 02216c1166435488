"""Copies from and to the host: what comes back, how it lies, and buffers that are taken again."""

from __future__ import annotations

import pytest
import torch

from mgraph.runtime import offload
from mgraph.runtime.collectives import wait
from mgraph.runtime.offload import on_host, store_start, to_device_start, to_host_start


@pytest.mark.parametrize("late", [False, True])
def test_there_and_back(monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    """Whether copies are made at once, or as late as they may be."""
    monkeypatch.setattr(offload, "late_copies", late)
    dense = torch.arange(24.0).reshape(2, 3, 4).transpose(1, 2)
    gaps = torch.arange(20).reshape(4, 5)[:, 1:3]
    there = wait(to_host_start([dense, gaps]))
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(there, (dense, gaps), strict=True))
    back = wait(to_device_start(there))
    assert torch.equal(back[0], dense) and back[0].stride() == dense.stride()
    assert torch.equal(back[1], gaps) and back[1].is_contiguous()


def test_buffers_are_given_back_at_the_wait_and_taken_again() -> None:
    tensor = torch.rand(7, 11)
    (first,) = wait(to_host_start([tensor]))
    (second,) = wait(to_host_start([tensor]))
    places = {first.data_ptr(), second.data_ptr()}
    assert len(places) == 2, "what is not fetched is kept"
    pending = to_device_start([first])
    (third,) = wait(to_host_start([tensor]))
    assert third.data_ptr() not in places, "the copy back is under way"
    wait(pending)
    (fourth,) = wait(to_host_start([tensor + 1]))
    assert fourth.data_ptr() == first.data_ptr() and torch.equal(fourth, tensor + 1)


def test_state_is_written_in_place() -> None:
    state = on_host(torch.zeros(5), "cpu")
    (here,) = wait(to_device_start([state]))
    assert here.data_ptr() != state.data_ptr()
    (stored,) = wait(store_start([state], [here.add_(2)]))
    assert stored is state and state.tolist() == [2.0] * 5
