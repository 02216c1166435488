"""Scaled dot-product attention and its gradient on torch's fused kernels, with a plain form where none fits.

q [B, H, S, D], k [B, G, T, D], v [B, G, T, E] → out [B, H, S, E], lse f32 [B, H, S] (log sum exp of the scaled and
masked scores). Query head h reads key head h // (H/G). Query i sits at position p = start + i (start 0 if None) and
sees key j where `j <= p` (causal) and `j > p - window` (window).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mgraph.runtime.ops import wide

_aten: Any = torch.ops.aten
_LSE_ROWS = 32
"""The efficient kernel pads the rows of its lse to a multiple of this."""


@dataclass(frozen=True)
class Mask:
    """What a query sees."""

    scale: float
    causal: bool
    window: int | None
    start: Tensor | None

    @property
    def simple(self) -> bool:
        """Whether `causal` says everything."""
        return self.window is None and self.start is None

    def hidden(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """True where a query does not see a key, [queries, keys]."""
        rows = torch.arange(queries, device=device)[:, None] + (0 if self.start is None else self.start)
        columns = torch.arange(keys, device=device)
        hidden = columns > rows if self.causal else torch.zeros(queries, keys, dtype=torch.bool, device=device)
        return hidden if self.window is None else hidden | (columns <= rows - self.window)

    def bias(self, q: Tensor, k: Tensor) -> Tensor | None:
        """What to add to the scores, [S, T], for kernels that take a mask; None where `causal` does it."""
        if self.simple:
            return None
        hidden = self.hidden(q.shape[2], k.shape[2], q.device)
        return torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, float("-inf"))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor | None = None,
    *,
    scale: float,
    causal: bool = False,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """out and lse."""
    mask = Mask(scale, causal, window, start)
    kernel = _kernel(q, k, v, mask)
    if kernel == "cpu":
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal and mask.simple, attn_mask=mask.bias(q, k), scale=scale
        )
    elif kernel == "flash":
        out, lse = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[:2]
    elif kernel == "efficient":
        k, v = _repeated(q, k), _repeated(q, v)
        out, lse = _aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)[:2]
        lse = lse[:, :, : q.shape[2]]
    else:
        scores = _scores(q, k, mask)
        lse = scores.logsumexp(-1)
        weights = scores.sub_(lse[..., None]).exp_()
        out = torch.einsum("bgrst,bgte->bgrse", weights, wide(v)).flatten(1, 2).to(q.dtype)
        lse = lse.flatten(1, 2)
    return out, lse


def attention_grad(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    start: Tensor | None = None,
    *,
    scale: float,
    causal: bool = False,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients for q, k and v."""
    mask = Mask(scale, causal, window, start)
    kernel = _kernel(q, k, v, mask)
    dq: Tensor
    dk: Tensor
    dv: Tensor
    if kernel == "cpu":
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, causal and mask.simple, attn_mask=mask.bias(q, k), scale=scale
        )
    elif kernel == "flash":
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, unused, unused[0], scale=scale
        )
    elif kernel == "efficient":
        lse = F.pad(lse, (0, -lse.shape[2] % _LSE_ROWS), value=float("inf"))
        unused = torch.empty((), dtype=torch.int64, device=q.device)
        keys, values = _repeated(q, k), _repeated(q, v)
        dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
            dout, q, keys, values, None, out, lse, unused, unused, 0.0, [True, True, True, False], causal, scale=scale
        )
        dk, dv = _summed(dk, k), _summed(dv, v)
    else:
        dq, dk, dv = _plain_grad(dout, q, k, v, out, lse, mask)
    return dq, dk, dv


def _kernel(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> str:
    """Which form runs: `cpu`, `flash`, `efficient` or `plain`; the same for an attention and its gradient."""
    even = q.shape[3] == v.shape[3]
    if q.device.type == "cpu":
        return "cpu" if even and q.dtype != torch.float16 else "plain"
    aligned = q.shape[3] % 8 == 0 and q.shape[3] <= 256
    if not (mask.simple and even and aligned and (q.shape[2] == k.shape[2] or not mask.causal)):
        return "plain"
    if q.dtype in (torch.float16, torch.bfloat16):
        return "flash"
    return "efficient" if q.dtype == torch.float32 else "plain"


def _grouped(heads: Tensor, k: Tensor) -> Tensor:
    """[B, H, ...] as [B, G, H/G, ...] in at least f32, for the G heads of k."""
    batch, _, *rest = heads.shape
    return wide(heads).reshape(batch, k.shape[1], -1, *rest)


def _repeated(q: Tensor, k: Tensor) -> Tensor:
    """k with a head for each of q."""
    repeats = q.shape[1] // k.shape[1]
    return k if repeats == 1 else k.repeat_interleave(repeats, 1)


def _summed(grad: Tensor, like: Tensor) -> Tensor:
    """The inverse of `_repeated` for gradients."""
    return grad if grad.shape == like.shape else grad.reshape(grad.shape[0], like.shape[1], -1, *grad.shape[2:]).sum(2)


def _scores(q: Tensor, k: Tensor, mask: Mask) -> Tensor:
    """Scaled and masked scores [B, G, H/G, S, T]."""
    scores = torch.einsum("bgrsd,bgtd->bgrst", _grouped(q, k), wide(k)).mul_(mask.scale)
    if mask.causal or not mask.simple:
        scores.masked_fill_(mask.hidden(q.shape[2], k.shape[2], q.device), float("-inf"))
    return scores


def _plain_grad(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Mask
) -> tuple[Tensor, Tensor, Tensor]:
    """P = exp(scores - lse), D = sum(dout * out): dv = P'dout, ds = P (dout v' - D) scale, dq = ds k, dk = ds' q."""
    grad = _grouped(dout, k)
    weights = _scores(q, k, mask).sub_(_grouped(lse, k)[..., None]).exp_()
    delta = (grad * _grouped(out, k)).sum(-1, keepdim=True)
    dv = torch.einsum("bgrst,bgrse->bgte", weights, grad)
    dscores = torch.einsum("bgrse,bgte->bgrst", grad, wide(v)).sub_(delta).mul_(weights).mul_(mask.scale)
    dq = torch.einsum("bgrst,bgtd->bgrsd", dscores, wide(k)).flatten(1, 2)
    dk = torch.einsum("bgrst,bgrsd->bgtd", dscores, _grouped(q, k))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
