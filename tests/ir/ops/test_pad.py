"""Padded dims: whole against a loop over parts, and the parts of ranks put together against the whole."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from mgraph.ir.opdef import op_def

CASES = [((5,), (6,), 3, 0), ((5,), (8,), 4, 1), ((2, 3), (2, 4), 4, 2), ((3, 2), (4, 3), 6, 0), ((1,), (4,), 4, 1)]
"""Parts, what they become, ranks, dim."""


@pytest.mark.parametrize(("parts", "to", "ranks", "dim"), CASES)
def test_ranks_have_the_padded_dim(parts: tuple[int, ...], to: tuple[int, ...], ranks: int, dim: int) -> None:
    each = 3
    shape = [2, 4, 3]
    shape[dim] = each * math.prod(parts)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    attrs = {"dim": dim, "parts": parts, "to": to}
    whole = op_def("pad_extent").body(x, **attrs)
    pieces = dict(zip(itertools.product(*map(range, parts)), x.split(each, dim), strict=True))
    nothing = torch.zeros_like(x.narrow(dim, 0, each))
    assert torch.equal(whole, torch.cat([pieces.get(i, nothing) for i in itertools.product(*map(range, to))], dim))
    own = [op_def("padded_part").body(x, torch.tensor(i), **attrs, ranks=ranks) for i in range(ranks)]
    assert torch.equal(torch.cat(own, dim), whole)
    dy = torch.randn_like(whole)
    whole.backward(dy)
    assert x.grad is not None and torch.equal(op_def("pad_extent_grad").body(dy, **attrs), x.grad)


def test_types() -> None:
    from mgraph.ir.types import DType, TensorType

    define = op_def("pad_extent")
    x = TensorType(DType.F32, (6, 5))
    assert define.result_types([x], {"dim": 0, "parts": (3,), "to": (4,)}) == (TensorType(DType.F32, (8, 5)),)
    with pytest.raises(ValueError, match="is not made of"):
        define.result_types([x], {"dim": 1, "parts": (3,), "to": (4,)})
    with pytest.raises(ValueError, match="by padding"):
        define.result_types([x], {"dim": 0, "parts": (3,), "to": (2,)})
