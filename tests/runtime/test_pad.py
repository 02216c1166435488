"""The runtime's padded dims against what the ops of the graph mean."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from mgraph.ir.opdef import op_def
from mgraph.runtime import pad


@pytest.mark.parametrize(
    ("parts", "to", "ranks"), [((5,), (8,), 4), ((2, 3), (2, 4), 4), ((2, 3), (4, 6), 3), ((6,), (6,), 2)]
)
def test_same_as_in_the_graph(parts: tuple[int, ...], to: tuple[int, ...], ranks: int) -> None:
    attrs: dict[str, Any] = {"dim": 1, "parts": parts, "to": to}
    x = torch.randn(3, 7 * math.prod(parts), 2)
    dy = torch.randn(3, 7 * math.prod(to), 2)
    assert torch.equal(pad.pad_extent(x, **attrs), op_def("pad_extent").body(x, **attrs))
    assert torch.equal(pad.pad_extent_grad(dy, **attrs), op_def("pad_extent_grad").body(dy, **attrs))
    for index in range(ranks):
        found = pad.padded_part(x, index, **attrs, ranks=ranks)
        assert torch.equal(found, op_def("padded_part").body(x, torch.tensor(index), **attrs, ranks=ranks))


def test_a_part_without_zeros_is_a_view() -> None:
    x = torch.randn(7, 4)
    assert pad.padded_part(x, 1, dim=0, parts=(7,), to=(8,), ranks=4).data_ptr() == x[2:].data_ptr()
    last = pad.padded_part(x, 3, dim=0, parts=(7,), to=(8,), ranks=4)
    assert torch.equal(last[0], x[6]) and not last[1].any()
