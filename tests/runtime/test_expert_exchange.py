"""What a step calls gives what the ops mean; that it works on several processes is in end_to_end/test_mesh_table.py."""

from __future__ import annotations

import pytest
import torch

from mgraph.errors import PackageError
from mgraph.ir.opdef import op_def
from mgraph.runtime import expert_exchange as e
from tests.ir.ops.test_expert_exchange import CASES, body, routing


@pytest.mark.parametrize(("tokens", "choices", "experts", "ranks"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_as_the_ops_say(tokens: int, choices: int, experts: int, ranks: int, dtype: torch.dtype) -> None:
    indices = routing(tokens, choices, experts)
    places = e.expert_places(indices, num_experts=experts, ranks=ranks)
    assert torch.equal(places, body("expert_places", indices, num_experts=experts, ranks=ranks))
    x = (10 * torch.randn(tokens, 3)).to(dtype)
    packed = e.pack_rows(x, places, fill=-1)
    assert torch.equal(packed, body("pack_rows", x, places, rows="R", fill=-1))
    if dtype.is_floating_point:
        packed[packed == -1] = float("nan")  # rows that nobody sent
        assert torch.equal(e.unpack_rows(packed, places), body("unpack_rows", packed, places))


@pytest.mark.parametrize("wrong", [-1, 9])
def test_an_expert_that_there_is_not_is_told_of(wrong: int) -> None:
    with pytest.raises(PackageError, match=f"a router chose expert {wrong}, and the experts are 0 to 7"):
        e.expert_places(torch.tensor([[0, 8], [wrong, 3]]), num_experts=8, ranks=2)
    with pytest.raises(PackageError, match=f"a router chose expert {wrong}"):
        e.own_choices(torch.tensor([[0, 8], [wrong, 3]]), 1, num_experts=8, ranks=2, used=True)


def test_choices_and_tails() -> None:
    indices = torch.tensor([[0, 5], [4, 7], [-1, -1]])
    for index in (0, 1):
        expected = op_def("own_choices").body(indices, torch.tensor(index), num_experts=8, ranks=2)
        assert torch.equal(e.own_choices(indices, index, num_experts=8, ranks=2), expected)
    rows, offsets = torch.full((4, 2), float("nan")), torch.tensor([0, 2], dtype=torch.int32)
    rows[:2] = 1
    assert e.clear_tail(rows, offsets).tolist() == [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]
