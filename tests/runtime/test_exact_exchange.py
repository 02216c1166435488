"""What a step calls to send exact rows gives what the ops mean; on processes it is in end_to_end/test_mesh_table.py."""

from __future__ import annotations

import pytest
import torch

from mgraph.runtime import exact_exchange, expert_exchange
from tests.ir.ops.test_exact_exchange import messages
from tests.ir.ops.test_expert_exchange import body


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_as_the_ops_say(tokens: int, ranks: int) -> None:
    places, _ = messages(tokens, ranks)
    sent = body("rows_sent", places)
    sizes = exact_exchange.read_sizes(sent, sent + 1)
    assert torch.equal(sizes, body("read_sizes", sent, sent + 1))
    order, rows = exact_exchange.exact_places(places, sizes)
    expected = body("exact_places", places, sizes, rows="R_sent")
    assert torch.equal(order, expected[0]) and torch.equal(rows, expected[1])
    packed = torch.randn(len(order), 3)
    found = expert_exchange.unpack_rows(packed, rows, part=0.0)
    torch.testing.assert_close(found, body("unpack_rows", packed, rows, part=0.0))
