"""Joined tensors: what the ops give, against the ops that they join, and which types are refused."""

from __future__ import annotations

import pytest
import torch

from mgraph.ir.opdef import op_def
from mgraph.ir.ops.glu import glu_grad
from mgraph.ir.ops.rope import rope
from mgraph.ir.types import DType, TensorType


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def type_of(*shape: int, dtype: DType = DType.F32) -> TensorType:
    return TensorType(dtype, shape)


@pytest.mark.parametrize("fresh", [False, True])
def test_totals_take_their_rows(fresh: bool) -> None:
    totals, part = [draw(2, 4), draw(3, 4)], draw(5, 4)
    got = op_def("accumulate_joined").body(*totals, part, fresh=fresh)
    start = 0 if fresh else 1
    assert torch.equal(torch.cat(got), start * torch.cat(totals) + part)
    assert torch.equal(op_def("joined").body(*totals), torch.cat(totals))


def test_gradients_lie_beside_each_other() -> None:
    dy, gate, up = draw(3, 6), draw(3, 6) + 1, draw(3, 6) - 1
    got = op_def("glu_grad_joined").body(dy, gate, up, act="silu")
    want = glu_grad(dy, gate, up, act="silu")
    assert torch.equal(got, torch.cat(want, -1))
    swapped, turns = (
        op_def("glu_grad_joined").body(dy, gate, up, act="silu", layout=layout) for layout in ("swapped", "interleaved")
    )
    assert torch.equal(swapped, torch.cat(want[::-1], -1))
    assert torch.equal(turns[:, ::2], want[0]) and torch.equal(turns[:, 1::2], want[1])
    with pytest.raises(ValueError, match="layout 'rows' is none of halves"):
        op_def("glu_grad_joined").result_types([type_of(3, 6)] * 3, {"act": "silu", "layout": "rows"})


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_heads_lie_beside_each_other(style: str) -> None:
    q, k, v = draw(2, 4, 3, 8), draw(2, 2, 3, 8), draw(2, 1, 3, 8)
    cos, sin = draw(1, 1, 3, 8), draw(1, 1, 3, 8).flip(-1)
    got = op_def("rope_join").body(q, k, v, cos, sin, style=style, inverse=True)
    heads = got.view(2, 3, 7, 8).transpose(1, 2)
    for found, x in zip(heads.split([4, 2, 1], 1), (q, k, None), strict=True):
        assert torch.equal(found, v if x is None else rope(x, cos, sin, style=style, inverse=True))


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_first_heads_turn(style: str) -> None:
    x, cos, sin = draw(2, 3, 5 * 8), draw(3, 4), draw(3, 4).flip(-1)
    got = op_def("rope_joined").body(x, cos, sin, heads=3, width=8, style=style)
    heads, found = (t.view(2, 3, 5, 8).transpose(1, 2) for t in (x, got))
    assert torch.equal(found[:, 3:], heads[:, 3:])
    assert torch.equal(found[:, :3], rope(heads[:, :3], cos, sin, style=style))


def test_types() -> None:
    infer = {
        name: op_def(name).result_types for name in ("joined", "accumulate_joined", "glu_grad_joined", "rope_join")
    }
    assert infer["joined"]([type_of(2, 4), type_of(3, 4)], {}) == (type_of(5, 4),)
    assert infer["accumulate_joined"]([type_of(2, 4), type_of(3, 4), type_of(5, 4)], {})[1] == type_of(3, 4)
    assert infer["glu_grad_joined"]([type_of(3, 6)] * 3, {"act": "silu"}) == (type_of(3, 12),)
    heads = [type_of(2, h, 3, 8) for h in (4, 2, 1)]
    assert infer["rope_join"]([*heads, type_of(3, 8), type_of(3, 8)], {}) == (type_of(2, 3, 56),)
    turned = {"heads": 6, "width": 8}
    assert op_def("rope_joined").result_types([type_of(2, 3, 56), type_of(3, 8), type_of(3, 8)], turned) == (
        type_of(2, 3, 56),
    )
    with pytest.raises(ValueError, match="no 6 heads"):
        op_def("rope_joined").result_types([type_of(2, 3, 40), type_of(3, 8), type_of(3, 8)], turned)
    for name, types in (
        ("joined", [type_of(2, 4), type_of(2, 5)]),
        ("joined", [type_of(2, 4), type_of(2, 4, dtype=DType.BF16)]),
        ("accumulate_joined", [type_of(2, 4), type_of(3, 4), type_of(4, 4)]),
        ("glu_grad_joined", [type_of(3, 6), type_of(3, 6), type_of(3, 5)]),
        ("rope_join", [*heads[:2], type_of(2, 1, 3, 4), type_of(3, 8), type_of(3, 8)]),
    ):
        with pytest.raises(ValueError):
            infer[name](types, {"act": "silu"} if "glu" in name else {})
