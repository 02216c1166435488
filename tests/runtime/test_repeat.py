"""The runtime's repeated parts against what the ops of the graph mean."""

from __future__ import annotations

import pytest
import torch

from mgraph.ir.opdef import op_def
from mgraph.runtime import repeat

OPS = ["repeat_parts", "repeat_parts_grad", "repeated_part", "repeated_part_grad"]


@pytest.mark.parametrize(("parts", "times", "ranks"), [(2, 2, 4), (3, 2, 2), (3, 4, 6), (5, 1, 5)])
@pytest.mark.parametrize("op", OPS)
def test_same_as_in_the_graph(op: str, parts: int, times: int, ranks: int) -> None:
    attrs = {"dim": 1, "parts": parts, "times": times}
    if "part_" not in op and op != "repeated_part":
        x = torch.randn(3, 7 * parts * times)
        assert torch.equal(getattr(repeat, op)(x, **attrs), op_def(op).body(x, **attrs))
        return
    x = torch.randn(3, 7 * (parts * times // ranks if op.endswith("grad") else parts))
    for index in range(ranks):
        found = getattr(repeat, op)(x, index, **attrs, ranks=ranks)
        torch.testing.assert_close(found, op_def(op).body(x, torch.tensor(index), **attrs, ranks=ranks))


def test_a_single_part_is_a_view() -> None:
    x = torch.randn(6, 4)
    own = repeat.repeated_part(x, 3, dim=0, parts=2, times=2, ranks=4)
    assert own.data_ptr() == x[3:].data_ptr() and own.shape == (3, 4)
