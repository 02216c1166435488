"""Repeated parts: whole against torch, and the parts of ranks put together against the whole."""

from __future__ import annotations

import pytest
import torch

from mgraph.ir.opdef import op_def

CASES = [(2, 2, 4, 0), (2, 3, 6, 1), (3, 2, 2, 1), (3, 4, 6, -1), (1, 4, 2, 0)]
"""Parts, times, ranks, dim."""


@pytest.mark.parametrize(("parts", "times", "ranks", "dim"), CASES)
def test_ranks_have_the_repeated_parts(parts: int, times: int, ranks: int, dim: int) -> None:
    x = torch.randn([parts * 5] * 3, dtype=torch.float64, requires_grad=True)
    dim %= x.ndim
    attrs = {"dim": dim, "parts": parts, "times": times}
    whole = op_def("repeat_parts").body(x, **attrs)
    copies = [piece for piece in x.chunk(parts, dim) for _ in range(times)]
    assert torch.equal(whole, torch.cat(copies, dim))
    own = [op_def("repeated_part").body(x, torch.tensor(i), **attrs, ranks=ranks) for i in range(ranks)]
    assert torch.equal(torch.cat(own, dim), whole)
    dy = torch.randn_like(whole)
    whole.backward(dy)
    assert x.grad is not None
    torch.testing.assert_close(op_def("repeat_parts_grad").body(dy, **attrs), x.grad, rtol=1e-12, atol=1e-12)
    grad = op_def("repeated_part_grad").body
    shares = [grad(d, torch.tensor(i), **attrs, ranks=ranks) for i, d in enumerate(dy.chunk(ranks, dim))]
    torch.testing.assert_close(sum(shares), x.grad, rtol=1e-12, atol=1e-12)
