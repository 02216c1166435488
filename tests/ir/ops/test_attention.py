"""attention against torch's scaled_dot_product_attention with an explicit mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mgraph.ir.opdef import op_def
from mgraph.ir.types import DType, TensorType

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
    check_op("attention", operands, {"scale": 1.5, "causal": True, "window": window, "extra": ("start",)}, reference)


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


EXTRAS: list[tuple[str, ...]] = [
    ("sinks",),
    ("segments",),
    ("keys",),
    ("segments", "segments"),
    ("sinks", "segments", "keys"),
]


def _extra(names: tuple[str, ...], batch: int, heads: int, rows: int) -> list[Tensor]:
    """Operands by name; the first key is never seen, so that a causal mask leaves rows that see nothing."""
    made = []
    for name in names:
        if name == "sinks":
            made.append(torch.randn(heads).requires_grad_())
        elif name == "segments":
            made.append(torch.randint(2, (batch, rows)).cumsum(1))
        else:
            keys = torch.rand(batch, rows) < 0.7
            keys[:, 0] = False
            made.append(keys)
    return made


@pytest.mark.parametrize("names", EXTRAS)
@pytest.mark.parametrize(("causal", "window", "softcap"), [(True, None, None), (True, 3, 1.5), (False, None, 0.5)])
def test_sinks_segments_keys_and_softcap(
    check_op: Any, names: tuple[str, ...], causal: bool, window: int | None, softcap: float | None
) -> None:
    """Against the explicit softmax with one more column; exp of minus infinity is 0 in a row that sees nothing."""
    batch, heads, groups, rows = 2, 6, 2, 7
    more = _extra(names, batch, heads, rows)
    place = _visible(rows, rows, 0, causal, window)

    def reference(q: Tensor, k: Tensor, v: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = k.repeat_interleave(heads // groups, 1), v.repeat_interleave(heads // groups, 1)
        scores = q @ keys.mT * 0.7
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        seen = place.expand(batch, 1, rows, rows)
        sink = torch.full((batch, heads, rows, 1), -torch.inf, dtype=q.dtype)
        for name, value in zip(names, given, strict=True):
            if name == "sinks":
                sink = value[None, :, None, None].expand(batch, heads, rows, 1)
            elif name == "segments":
                seen = seen & (value[:, None, :, None] == value[:, None, None, :])
            else:
                seen = seen & value[:, None, None, :]
        weights = torch.cat((scores.masked_fill(~seen, -torch.inf), sink), -1)
        lse = weights.logsumexp(-1)
        shares = (weights - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
        return shares[..., :-1] @ values, lse

    operands = (*_operands((batch, heads, groups, rows, rows, 5, 4)), *more)
    attrs = {"scale": 0.7, "causal": causal, "window": window, "softcap": softcap, "extra": names}
    check_op("attention", operands, attrs, reference)


@pytest.mark.parametrize(
    ("extra", "shapes", "wrong"),
    [
        (("sinks",), [(3,)], "sinks .* does not fit"),
        (("segments",), [(2, 4)], "segments has the dtype"),
        (("sinks",), [], "0 operands after v, but extra names 1"),
        (("bias",), [(4,)], "bias .* does not fit"),
    ],
)
def test_operands_that_do_not_fit_are_refused(
    extra: tuple[str, ...], shapes: list[tuple[int, ...]], wrong: str
) -> None:
    heads = TensorType(DType.F32, (2, 4, 4, 8))
    types = [heads] * 3 + [TensorType(DType.F32, s) for s in shapes]
    with pytest.raises(ValueError, match=wrong):
        op_def("attention").result_types(types, {"scale": 1.0, "extra": extra})


@pytest.mark.parametrize("sunk", [False, True])
def test_a_row_of_large_scores_loses_no_precision(sunk: bool) -> None:
    """Against float64: as good as torch's softmax, though the logarithm of the sum is far from 0."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 4, 16, 8) for _ in range(3))
    sinks = torch.randn(4) + 60
    operands, extra = ([q + 8, k + 8, v, sinks], ("sinks",)) if sunk else ([q + 8, k + 8, v], ())

    def reference(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
        scores = (q @ k.mT).masked_fill(~torch.ones(16, 16, dtype=torch.bool).tril(), -torch.inf)
        columns = [each[None, :, None, None].expand(2, 4, 16, 1) for each in sinks]
        return torch.cat([scores, *columns], -1).softmax(-1)[..., :16] @ v

    exact = reference(*(t.double() for t in operands))
    found = op_def("attention").body(*operands, scale=1.0, causal=True, extra=extra)[0]
    own, best = ((each.double() - exact).norm() for each in (found, reference(*operands)))
    assert own <= 1.1 * best
