"""attention against torch's scaled_dot_product_attention with an explicit mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

SHAPES = [  # B, H, G, S, T, D, E
    (2, 4, 2, 5, 5, 8, 8),
    (1, 1, 1, 1, 1, 1, 1),
    (2, 6, 1, 3, 7, 5, 4),
    (1, 3, 3, 17, 17, 2, 6),
]


def _operands(shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    b, h, g, s, t, d, e = shape
    q, k, v = torch.randn(b, h, s, d), torch.randn(b, g, t, d), torch.randn(b, g, t, e)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def _visible(s: int, t: int, start: int, causal: bool, window: int | None) -> Tensor:
    seen = torch.ones(s, t, dtype=torch.bool)
    for i in range(s):
        for j in range(t):
            seen[i, j] = (not causal or j <= start + i) and (window is None or j > start + i - window)
    return seen


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 2), (True, 1), (False, 20)])
def test_values_and_gradient(check_op: Any, shape: tuple[int, ...], causal: bool, window: int | None) -> None:
    seen = _visible(shape[3], shape[4], 0, causal, window)

    def reference(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        repeats = q.shape[1] // k.shape[1]
        keys, values = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        lse = (q @ keys.mT * 0.3).masked_fill(~seen, -torch.inf).logsumexp(-1)
        return functional.scaled_dot_product_attention(q, keys, values, seen, scale=0.3), lse

    check_op("attention", _operands(shape), {"scale": 0.3, "causal": causal, "window": window}, reference)


@pytest.mark.parametrize("start", [0, 1, 4])
@pytest.mark.parametrize("window", [None, 3])
def test_start_continues_a_sequence(check_op: Any, start: int, window: int | None) -> None:
    q, k, v = _operands((2, 4, 2, 3, 7, 4, 4))
    seen = _visible(3, 7, start, True, window)

    def reference(q: Tensor, k: Tensor, v: Tensor, start: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, seen, scale=1.5, enable_gqa=True)

    operands = (q, k, v, torch.tensor(start))
    check_op("attention", operands, {"scale": 1.5, "causal": True, "window": window}, reference)


def test_low_precision_rounds_once(run_op: Any) -> None:
    q, k, v = (t.detach().bfloat16().requires_grad_() for t in _operands(SHAPES[0]))
    dout = torch.randn(2, 4, 5, 8).bfloat16()
    (out, lse), grads = run_op("attention", (q, k, v), {"scale": 0.3, "causal": True}, dout)
    assert lse.dtype == torch.float32
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    exact = functional.scaled_dot_product_attention(
        wide[0], wide[1], wide[2], is_causal=True, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(out, exact.bfloat16(), rtol=1e-2, atol=1e-6)
    for ours, theirs in zip(grads, torch.autograd.grad(exact, wide, dout.double()), strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-2, atol=1e-2)
