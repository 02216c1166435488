"""What a step calls to lay out rows by capacity gives what the ops mean."""

from __future__ import annotations

import pytest
import torch

from mgraph.errors import PackageError
from mgraph.ir.types import DType
from mgraph.runtime import capacity_layout as c
from tests.ir.ops.test_capacity_layout import CASES, case
from tests.ir.ops.test_expert_exchange import body


@pytest.mark.parametrize("given", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_the_ops_say(given: tuple[int, int, int, float], dtype: torch.dtype) -> None:
    x, weights, indices, _ = case(*given)
    x, weights, attrs = x.to(dtype), weights.float(), {"num_experts": given[2], "factor": given[3]}
    expected = body("padded_dispatch", x, indices, **attrs)
    rows, places = c.padded_dispatch(x, indices, num_experts=given[2], factor=given[3])
    assert torch.equal(rows, expected[0]) and torch.equal(places, expected[1])
    assert torch.equal(c.even_ends(rows, num_experts=given[2]), body("even_ends", rows, num_experts=given[2]))
    y, dy = torch.randn(rows.shape).to(dtype), torch.randn(x.shape).to(dtype)
    combined = c.padded_combine(y, weights, places, dtype=torch.float32)
    torch.testing.assert_close(combined, body("padded_combine", y, weights, places, dtype=DType.F32))
    made, wanted = c.padded_combine_grad(dy, y, weights, places), body("padded_combine_grad", dy, y, weights, places)
    torch.testing.assert_close(made[0], wanted[0])
    torch.testing.assert_close(made[1], wanted[1])
    swapped = c.swap_blocks(rows, first=given[2], second=1)
    assert torch.equal(swapped, body("swap_blocks", rows, first=given[2], second=1))


def test_an_expert_that_is_chosen_twice_for_a_token_takes_no_other_experts_rows() -> None:
    x, indices = torch.randn(3, 4), torch.tensor([[1, 1], [1, 0], [2, 1]])
    with pytest.raises(PackageError, match="more than 3 rows, which is its capacity"):
        c.padded_dispatch(x, indices, num_experts=4, factor=2.0)
    _, places = c.padded_dispatch(x.to("meta"), indices.to("meta"), num_experts=4, factor=2.0)  # there is no look
    assert places.shape == indices.shape
