"""Messages of exactly as many rows as there are, against loops over tokens: what goes where, and comes back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mgraph.ir.interpreter import run_ranks
from mgraph.ir.opdef import op_def
from mgraph.ir.parser import parse_module
from tests.ir.ops.test_expert_exchange import body, routing


def messages(tokens: int, ranks: int) -> tuple[Tensor, list[list[int]]]:
    """Places, and by rank the tokens that go there; some go nowhere."""
    indices = routing(tokens, 2, 8)
    indices[0] = 8
    goes = [[t for t, c in enumerate(indices.tolist()) if any(e // (8 // ranks) == r for e in c)] for r in range(ranks)]
    return body("expert_places", indices, num_experts=8, ranks=ranks), goes


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_rows_are_those_of_each_rank_after_the_other(tokens: int, ranks: int) -> None:
    places, goes = messages(tokens, ranks)
    sent = body("rows_sent", places)
    assert sent.tolist() == [len(each) for each in goes]
    sizes = body("read_sizes", sent, torch.zeros_like(sent))
    assert sizes.tolist() == [sent.tolist(), [0] * ranks]
    order, rows = body("exact_places", places, sizes, rows="R_sent")
    assert order.tolist() == [t for each in goes for t in each]
    x = torch.randn(tokens, 3)
    packed = body("take_rows", x, order)
    assert torch.equal(packed, x[order])
    times = torch.tensor([sum(t in each for each in goes) for t in range(tokens)])
    torch.testing.assert_close(body("unpack_rows", packed, rows, part=0.0), x * times[:, None])


AT = ' forward at "m" "m.py":1 by test'
EQUAL = '{axis = "ep", join_dim = 0, split_dim = 0}'
TEXT = f"""mgraph-ir 1
module "m"
dim T 1..
dim R 0.. ragged <= 2*T by host
dim Q 0.. ragged <= 2*T by host
axis ep = 2
func @main(%x: f32[T, 3]{{ep=S(0)}}, %sent: i64[4]{{ep=S(0)}}) {{
  %got: i64[4]{{ep=S(0)}} = all_to_all(%sent) {EQUAL}{AT}
  %sizes: i64[2, 4]{{ep=S(1)}} = read_sizes(%sent, %got){AT}
  %y: f32[R, 3]{{ep=S(0)}} = all_to_all(%x, %sizes) {EQUAL[:-1]}, rows = "R"}}{AT}
  %z: f32[Q, 3]{{ep=S(0)}} = all_to_all(%y, %sizes) {EQUAL[:-1]}, back = true, rows = "Q"}}{AT}
  %o: f32[R, 3]{{ep=S(0)}} = aten.zeros.default() {{dtype = f32, size = [R, 3]}}{AT}
  return %y, %z, %o
}}
entry main = @main -> (there, back, told)
"""


@pytest.mark.parametrize("split", [(3, 1), (0, 4), (4, 0), (2, 2)])
def test_each_rank_gets_what_the_others_send_it(split: tuple[int, int]) -> None:
    module = parse_module(TEXT)
    x = [torch.randn(4, 3), torch.randn(2, 3)]
    sent = [torch.tensor(split), torch.tensor([1, 1])]
    inputs = [{"x": t, "sent": s} for t, s in zip(x, sent, strict=True)]
    found, _ = run_ranks(module, "main", inputs, [{}] * 2, {"ep": 2})
    cut = split[0]
    assert torch.equal(found[0]["there"], torch.cat([x[0][:cut], x[1][:1]]))
    assert torch.equal(found[1]["there"], torch.cat([x[0][cut:], x[1][1:]]))
    for rank in range(2):
        assert torch.equal(found[rank]["back"], x[rank])
        assert found[rank]["told"].shape == found[rank]["there"].shape, "an op that is told the extent"


def test_on_one_rank_nothing_is_sent() -> None:
    indices = routing(5, 2, 8)
    sizes = body("expert_sizes", indices, num_experts=8, rows="R", ranks=2)
    assert sizes.shape == (2, 4) and not sizes.any()
    x = torch.randn(5, 3)
    send = op_def("expert_send").body(x, sizes, indices, num_experts=8, rows="R", choices=True, exact=True)
    assert send == (x, indices)
    assert op_def("expert_return").body(x, sizes, indices, num_experts=8, rows="R", exact=True) == (x,)
