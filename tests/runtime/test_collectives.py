"""Collectives over an axis of one rank; those of two processes are in test_v1.py."""

from __future__ import annotations

import torch

from mgraph.runtime import collectives as c


def test_alone_every_collective_gives_what_it_was_handed() -> None:
    tensors = [torch.randn(3), torch.randn(2, 2).bfloat16(), torch.arange(3)]
    before = [tensor.clone() for tensor in tensors]
    for found in (
        c.all_reduce(tensors, "dp"),
        c.all_gather(tensors, "dp", 0),
        c.reduce_scatter(tensors, "dp", 0, "max"),
        c.wait(c.all_gather_start(tensors, "dp", 0)),
    ):
        assert all(a is b for a, b in zip(found, tensors, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def test_alone_a_wide_sum_is_wide() -> None:
    tensors = [torch.randn(2, 2).bfloat16(), torch.randn(3).half(), torch.randn(3).double(), torch.arange(3)]
    found = c.wait(c.reduce_scatter_start(tensors, "dp", 0, wide=True))
    assert [tensor.dtype for tensor in found] == [torch.float32, torch.float32, torch.float64, torch.int64]
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(found, tensors, strict=True))
