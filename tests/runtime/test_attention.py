"""Attention of the runtime against the body that defines it, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mgraph.ir.opdef import op_def
from mgraph.runtime import v1 as rt

CASES: list[tuple[tuple[int, ...], dict[str, Any], int | None]] = [
    ((2, 4, 4, 7, 7, 16, 16), {"causal": True}, None),
    ((1, 4, 2, 33, 33, 16, 16), {"causal": True}, None),
    ((1, 6, 1, 5, 9, 8, 8), {}, None),
    ((2, 4, 2, 17, 17, 16, 16), {"causal": True, "window": 4}, None),
    ((1, 4, 2, 3, 12, 16, 16), {"causal": True}, 6),
    ((1, 2, 1, 1, 5, 8, 8), {"causal": True, "window": 2}, 4),
    ((1, 4, 2, 6, 6, 16, 8), {"causal": True}, None),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("sizes", "how", "start"), CASES)
def test_attention(sizes: tuple[int, ...], how: dict[str, Any], start: int | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    batch, heads, groups, queries, keys, width, value_width = sizes
    q = torch.randn(batch, queries, heads, width).transpose(1, 2).to(dtype)
    k = torch.randn(batch, keys, groups, width).transpose(1, 2).to(dtype)
    v = torch.randn(batch, keys, groups, value_width).transpose(1, 2).to(dtype)
    more = () if start is None else (torch.tensor(start),)
    how = {"scale": 0.3, **how}
    wide = [x.double() for x in (q, k, v)]
    expected, expected_lse = op_def("attention").body(*wide, *more, **how)
    out, lse = rt.attention(q, k, v, *more, **how)
    tolerance = 3e-2 if dtype == torch.bfloat16 else 2e-5
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=tolerance, atol=tolerance)

    dout = torch.randn(out.shape).to(dtype)
    grads = rt.attention_grad(dout, q, k, v, out, lse, *more, **how)
    want = op_def("attention_grad").body(dout.double(), *wide, expected, expected_lse, *more, **how)
    for grad, reference, like in zip(grads, want, (q, k, v), strict=True):
        assert grad.dtype == dtype and grad.shape == like.shape
        torch.testing.assert_close(grad.double(), reference, rtol=tolerance, atol=tolerance)
