"""Attention of the runtime against the body that defines it, in float64."""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

import pytest
import torch

from mgraph.ir.opdef import op_def
from mgraph.runtime import attention as attention_module
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
    how = {"scale": 0.3, **how} if start is None else {"scale": 0.3, "extra": ("start",), **how}
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


EXTRAS: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (("sinks",), {"causal": True}),
    (("segments",), {"causal": True, "window": 5}),
    (("segments", "segments"), {}),
    (("keys",), {"causal": True}),
    (("sinks", "keys"), {"causal": True, "softcap": 2.0}),
    (("sinks", "segments"), {"causal": True, "window": 4, "softcap": 1.0}),
]


@pytest.mark.parametrize("held", [2**24, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("names", "how"), EXTRAS)
def test_extra_operands(
    names: tuple[str, ...], how: dict[str, Any], dtype: torch.dtype, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole and in blocks of queries; with `keys`, rows that see nothing."""
    monkeypatch.setattr(attention_module, "BLOCK_ELEMENTS", held)
    batch, heads, groups, length = 2, 6, 2, 19
    q, k, v = (torch.randn(batch, n, length, 8).to(dtype) for n in (heads, groups, groups))
    keys = torch.rand(batch, length) < 0.6
    keys[:, :2] = False
    values = {"sinks": torch.randn(heads).to(dtype), "keys": keys}
    more = [values[n] if n in values else torch.randint(2, (batch, length)).cumsum(1) for n in names]
    how = {"scale": 0.6, "extra": names, **how}
    exact = [t.double() if t.is_floating_point() else t for t in (q, k, v, *more)]
    expected, expected_lse = op_def("attention").body(*exact, **how)
    out, lse = rt.attention(q, k, v, *more, **how)
    tolerance = 4e-2 if dtype == torch.bfloat16 else 2e-5
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=tolerance, atol=tolerance)

    dout = torch.randn(out.shape).to(dtype)
    grads = rt.attention_grad(dout, q, k, v, out, lse, *more, **how)
    want = op_def("attention_grad").body(dout.double(), *exact[:3], expected, expected_lse, *exact[3:], **how)
    like = (q, k, v, *(t for n, t in zip(names, more, strict=True) if n == "sinks"))
    for grad, reference, given in zip(grads, want, like, strict=True):
        assert grad.dtype == dtype and grad.shape == given.shape
        scale = max(1.0, float(reference.abs().max()))
        torch.testing.assert_close(grad.double(), reference, rtol=tolerance, atol=tolerance * scale)


def test_a_window_reads_only_the_keys_it_reaches() -> None:
    mask = attention_module.Mask(1.0, True, 4, None, None, (), None)
    assert mask.reach(slice(128, 256), 300) == slice(125, 256)
    assert mask.reach(slice(0, 128), 300) == slice(0, 128)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sizes", [(2, 4, 2, 77, 77, 64), (1, 16, 8, 512, 512, 128), (3, 6, 6, 129, 129, 72)])
@pytest.mark.parametrize("form", ["cudnn", "flash"])
def test_fused_kernels_of_gpus(form: str, sizes: tuple[int, ...], causal: bool) -> None:
    """Permuted views of [B, S, H, D] as a step has them, bf16, against float64."""
    batch, heads, groups, queries, keys, width = sizes
    torch.manual_seed(0)
    shapes = [(batch, queries, heads, width), (batch, keys, groups, width), (batch, keys, groups, width)]
    q, k, v = (torch.randn(s, device="cuda", dtype=torch.bfloat16).permute(0, 2, 1, 3) for s in shapes)
    dout = torch.randn(batch, queries, heads, width, device="cuda", dtype=torch.bfloat16).permute(0, 2, 1, 3)
    how: dict[str, Any] = {"scale": width**-0.5, "causal": causal}
    torch.backends.cuda.enable_cudnn_sdp(form == "cudnn")
    try:
        out, lse = rt.attention(q, k, v, **how)
        grads = rt.attention_grad(dout, q, k, v, out, lse, **how)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    expected, expected_lse = rt.attention(*(t.detach() for t in exact), **how)
    reference = rt.attention_grad(dout.double(), *(t.detach() for t in exact), expected, expected_lse, **how)
    assert (lse.double() - expected_lse).abs().max() < 1e-2
    for got, want in zip((out, *grads), (expected, *reference), strict=True):
        assert (got.double() - want).norm() / want.norm() < 1e-2


SIMPLE: dict[str, Any] = {"scale": 1.0, "causal": True, "segments": ()}


def test_a_kernel_is_taken_by_name_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tensors that are on no CPU the form alone is asked for; what cannot be had is said once."""
    monkeypatch.setattr(attention_module, "_takes_cudnn", lambda q, k: True)
    monkeypatch.setattr(attention_module, "_said", set())

    def form(by: str, width: int = 64, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> str:
        q = torch.empty(2, 4, 32, width, dtype=dtype, device="meta")
        mask = attention_module.Mask(**{**dict.fromkeys(("window", "softcap", "start", "keys")), **SIMPLE, **changes})
        found = attention_module._form(q, q, q, mask, by)
        return next(name for name, listed in attention_module.FORMS.items() if listed is found)

    assert [form(by) for by in ("", "cudnn", "flash", "efficient", "torch")] == [
        "cudnn",
        "cudnn",
        "flash",
        "efficient",
        "torch",
    ]
    assert form("efficient", dtype=torch.float32) == "efficient"
    with pytest.warns(RuntimeWarning, match=r"attention by flash does not run here .*float32.*: efficient does"):
        assert form("flash", dtype=torch.float32) == "efficient"
    with pytest.warns(RuntimeWarning, match=r"attention by cudnn does not run here .*: torch does"):
        assert form("cudnn", window=8) == "torch"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert form("cudnn", width=60) == "torch", "said before"
        q = torch.zeros(1, 1, 4, 64)
        assert attention_module._form(q, q, q, attention_module.Mask(1.0, True, None, None, None, (), None), "flash")


class FlashAttnStub:
    """The two functions of the library that are called, in float64: heads stand behind tokens."""

    @staticmethod
    def scores(
        q: torch.Tensor, k: torch.Tensor, scale: float, causal: bool, left: int, right: int, cap: float
    ) -> torch.Tensor:
        repeated = k.repeat_interleave(q.shape[2] // k.shape[2], 2).double()
        scores = scale * torch.einsum("bshd,bthd->bhst", q.double(), repeated)
        scores = cap * torch.tanh(scores / cap) if cap else scores
        apart = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None]
        hidden = (apart < -left) if left >= 0 else torch.zeros_like(apart, dtype=torch.bool)
        hidden = hidden | (apart > right) if right >= 0 else hidden
        return scores.masked_fill(hidden | ((apart > 0) & causal), -torch.inf)

    def _flash_attn_forward(self, *given: Any) -> tuple[torch.Tensor, ...]:
        q, k, v, dropout, scale, causal, left, right, cap, slopes, softmax = given
        assert dropout == 0.0 and slopes is None and softmax is False and q.shape[1] == k.shape[1]
        scores = self.scores(q, k, scale, causal, left, right, cap)
        values = v.repeat_interleave(q.shape[2] // k.shape[2], 2).double()
        out = torch.einsum("bhst,bthd->bshd", scores.softmax(-1), values)
        return out.to(q.dtype), scores.logsumexp(-1).float(), torch.empty(0), torch.empty(2)

    def _flash_attn_backward(self, *given: Any) -> torch.Tensor:
        dout, q, k, v, out, lse, dq, dk, dv, dropout, scale, causal, left, right, cap, slopes, exact = given
        assert dropout == 0.0 and slopes is None and exact is False and lse.is_contiguous() and out.is_contiguous()
        with torch.enable_grad():
            leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
            scores = self.scores(leaves[0], leaves[1], scale, causal, left, right, cap)
            assert torch.allclose(scores.logsumexp(-1).float(), lse, atol=1e-3)
            values = leaves[2].repeat_interleave(q.shape[2] // k.shape[2], 2)
            torch.einsum("bhst,bthd->bshd", scores.softmax(-1), values).backward(dout.double())
        for grad, leaf in zip((dq, dk, dv), leaves, strict=True):
            grad.copy_(leaf.grad)
        return torch.empty(0)


@pytest.mark.parametrize("how", [{"causal": True}, {"causal": True, "window": 5, "softcap": 3.0}, {"window": 4}, {}])
def test_flash_attn_by_a_stub(how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_module, "_flash_attn", FlashAttnStub)
    monkeypatch.setattr(attention_module, "_form", lambda *given: attention_module.FORMS["flash-attn"])
    q, dout = (torch.randn(2, 4, 13, 16) for _ in range(2))
    k, v = (torch.randn(2, 2, 13, 16) for _ in range(2))
    given = {"scale": 0.3, **how}
    out, lse = rt.attention(q, k, v, **given)
    expected = op_def("attention").body(q.double(), k.double(), v.double(), **given)
    assert torch.allclose(out.double(), expected[0], atol=1e-5) and torch.allclose(lse.double(), expected[1], atol=1e-5)
    grads = rt.attention_grad(dout, q, k, v, out, lse, **given)
    wide = [t.double() for t in (dout, q, k, v)]
    for found, want in zip(grads, op_def("attention_grad").body(*wide, *expected, **given), strict=True):
        assert torch.allclose(found.double(), want, atol=1e-4)


def test_flash_attn_is_taken_where_it_is_and_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.empty(2, 4, 32, 64, dtype=torch.bfloat16, device="meta")
    mask = attention_module.Mask(1.0, True, 8, None, None, (), None)
    assert not attention_module._takes_flash_attn(q, q, q, mask), "it is not installed here"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert attention_module._takes_flash_attn(q, q, q, mask)
    assert attention_module._form(q, q, q, mask, "flash-attn") is attention_module.FORMS["flash-attn"]
    marked = attention_module.Mask(1.0, True, 8, None, None, (q,), None)
    assert not attention_module._takes_flash_attn(q, q, q, marked)
    assert not attention_module._takes_flash_attn(q.float(), q, q, mask)
