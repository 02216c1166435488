"""Scaled dot-product attention and its gradient on torch's fused kernels, with a plain form where none fits.

q [B, H, S, D], k [B, G, T, D], v [B, G, T, E] → out [B, H, S, E], lse f32 [B, H, S] (log sum exp of the scores that are
seen, and of the sink). `extra` names the operands that follow: start i64[], sinks [H], segments int [B, S] (any number
of them), keys [B, T]. Query head h reads key head h // (H/G). Query i sits at position p = start + i (start 0 if not
given) and sees key j where `j <= p` (causal), `j > p - window` (window), all segments are equal at i and j, and keys is
not 0 at j. A row that sees nothing gives 0.

Where a mask is more than causal, the queries are taken in blocks: memory is bounded by a block's scores or mask, and
keys that no query of a block can reach are left out. A sink changes only the sums: `out · exp(lse - lse')` with the
lse' that counts it; every gradient kernel starts from out and lse, and so needs no other change.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mgraph.runtime.ops import wide

_aten: Any = torch.ops.aten
_LSE_ROWS = 32
"""The efficient kernel pads the rows of its lse to a multiple of this."""
BLOCK_ELEMENTS = 2**24
"""At most so many scores, or elements of a mask, are held at once (but at least those of one query)."""
_HIDDEN = float("-inf")


@dataclass(frozen=True)
class Mask:
    """What a query sees, and how scores are made."""

    scale: float
    causal: bool
    window: int | None
    softcap: float | None
    start: Tensor | None
    segments: tuple[Tensor, ...]
    keys: Tensor | None

    @property
    def simple(self) -> bool:
        """Whether `causal` says everything that is hidden."""
        return self.window is None and self.start is None and not self.segments and self.keys is None

    def reach(self, rows: slice, keys: int) -> slice:
        """The keys that some query of a block may see by its position."""
        low, high = 0, keys
        if self.start is None:
            high = min(keys, rows.stop) if self.causal else keys
            low = 0 if self.window is None else max(0, min(rows.start - self.window + 1, high - 1))
        return slice(low, high)

    def hidden(self, rows: slice, columns: slice, device: torch.device) -> Tensor:
        """True where a query does not see a key: [1 or B, 1, rows, columns]."""
        queries = torch.arange(rows.start, rows.stop, device=device)[:, None] + (
            0 if self.start is None else self.start
        )
        keys = torch.arange(columns.start, columns.stop, device=device)
        hidden = keys > queries if self.causal else torch.zeros_like(keys > queries)
        if self.window is not None:
            hidden = hidden | (keys <= queries - self.window)
        hidden = hidden[None, None]
        for segments in self.segments:
            hidden = hidden | (segments[:, None, rows, None] != segments[:, None, None, columns])
        return hidden if self.keys is None else hidden | (self.keys[:, None, None, columns] == 0)


def _read(extra: Sequence[str], more: Sequence[Tensor], **attrs: Any) -> tuple[Mask, Tensor | None]:
    """The mask and the sinks of an attention's attributes and further operands."""
    given = dict(zip(extra, more, strict=True))
    segments = tuple(t for name, t in zip(extra, more, strict=True) if name == "segments")
    mask = Mask(start=given.get("start"), segments=segments, keys=given.get("keys"), **attrs)
    return mask, given.get("sinks")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *more: Tensor,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    extra: Sequence[str] = (),
    by: str = "",
) -> tuple[Tensor, Tensor]:
    """out and lse. `by` names the kernel to take on a GPU (see `FORMS`), where it fits."""
    mask, sinks = _read(extra, more, scale=scale, causal=causal, window=window, softcap=softcap)
    form = _form(q, k, v, mask, by)
    outs, sums = [], []
    for rows, columns in _blocks(q, k, mask, form):
        seen = _Block(mask, rows, columns, q)
        out, lse = form.forward(q[:, :, rows], k[:, :, columns], v[:, :, columns], seen)
        outs.append(out)
        sums.append(lse)
    out, lse = (parts[0] if len(parts) == 1 else torch.cat(parts, 2) for parts in (outs, sums))
    if sinks is not None:
        total = torch.logaddexp(lse, wide(sinks)[:, None])
        out, lse = out * (lse - total).exp()[..., None], total
    return out.to(q.dtype), lse


def attention_grad(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *more: Tensor,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    extra: Sequence[str] = (),
    by: str = "",
) -> tuple[Tensor, ...]:
    """Gradients for q, k and v, and for the sinks where there are; `by` as in `attention`."""
    mask, sinks = _read(extra, more, scale=scale, causal=causal, window=window, softcap=softcap)
    form = _form(q, k, v, mask, by)
    blocks = list(_blocks(q, k, mask, form))
    dqs: list[Tensor] = []
    dk = dv = torch.empty(0)
    whole = len(blocks) == 1 and blocks[0][1] == slice(0, k.shape[2])
    if not whole:
        dk, dv = torch.zeros_like(wide(k)), torch.zeros_like(wide(v))
    for rows, columns in blocks:
        seen = _Block(mask, rows, columns, q)
        at_rows = (dout[:, :, rows], q[:, :, rows], out[:, :, rows], lse[:, :, rows])
        part_q, part_k, part_v = form.backward(*at_rows, k[:, :, columns], v[:, :, columns], seen)
        dqs.append(part_q)
        if whole:
            dk, dv = part_k, part_v
        else:
            dk[:, :, columns] += part_k
            dv[:, :, columns] += part_v
    dq = dqs[0] if len(dqs) == 1 else torch.cat(dqs, 2)
    grads = dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
    if sinks is None:
        return grads
    share = (wide(sinks)[:, None] - lse).exp()
    dsinks = -(share * (wide(dout) * wide(out)).sum(-1)).sum((0, 2))
    return (*grads, dsinks.to(sinks.dtype))


def _blocks(q: Tensor, k: Tensor, mask: Mask, form: _Form) -> Iterator[tuple[slice, slice]]:
    """Blocks of queries, each with the keys that it may reach."""
    batch, heads, queries, _ = q.shape
    size = queries
    if form.whole_mask:
        yield slice(0, queries), slice(0, k.shape[2])
        return
    if form.whole_scores or not mask.simple:
        held = batch * (heads if form.whole_scores else 1) * k.shape[2]
        size = max(1, min(queries, BLOCK_ELEMENTS // held))
        if mask.window is not None and mask.start is None:
            size = min(size, max(mask.window, 128))
    for first in range(0, queries, size):
        rows = slice(first, min(queries, first + size))
        yield rows, mask.reach(rows, k.shape[2])


@dataclass(frozen=True)
class _Block:
    """The mask of a block of queries, for the kernels."""

    mask: Mask
    rows: slice
    columns: slice
    like: Tensor

    @property
    def causal(self) -> bool:
        """Whether the kernel's own causal mask is meant: the block is everything, and nothing else is hidden."""
        return self.mask.causal and self.mask.simple

    @property
    def hidden(self) -> Tensor:
        return self.mask.hidden(self.rows, self.columns, self.like.device)

    def bias(self) -> Tensor | None:
        """What to add to the scores, [1 or B, 1, rows, columns]; None where `causal` says everything."""
        if self.mask.simple:
            return None
        hidden = self.hidden
        bias = torch.zeros(hidden.shape, dtype=self.like.dtype, device=self.like.device)
        return bias.masked_fill_(hidden, _HIDDEN)


class _Form:
    """One way to run a block: out and lse, and from them the gradients of q, k and v. `whole_mask`: it knows windows,
    and takes all queries at once."""

    whole_scores = False
    whole_mask = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: _Block) -> tuple[Tensor, Tensor]:
        raise NotImplementedError(type(self).__name__)

    def backward(
        self, dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, block: _Block
    ) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError(type(self).__name__)


class _Cpu(_Form):
    """The flash kernel for CPUs. It gives 0 as the lse of a row that sees nothing."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: _Block) -> tuple[Tensor, Tensor]:
        bias = block.bias()
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, block.causal, attn_mask=bias, scale=block.mask.scale
        )
        if block.mask.keys is not None:
            lse = lse.masked_fill(block.hidden.all(-1), _HIDDEN)
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, block: _Block
    ) -> tuple[Tensor, Tensor, Tensor]:
        if block.mask.keys is not None:
            lse = lse.masked_fill(lse == _HIDDEN, 0.0)
        grads: tuple[Tensor, Tensor, Tensor] = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, block.causal, attn_mask=block.bias(), scale=block.mask.scale
        )
        return grads


class _Flash(_Form):
    """The flash kernel for GPUs: no mask but causal."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: _Block) -> tuple[Tensor, Tensor]:
        out, lse = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, block.causal, scale=block.mask.scale)[:2]
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, block: _Block
    ) -> tuple[Tensor, Tensor, Tensor]:
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)
        sizes = (None, None, q.shape[2], k.shape[2], 0.0, block.causal, unused, unused[0])
        grads: tuple[Tensor, Tensor, Tensor] = _aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse, *sizes, scale=block.mask.scale
        )
        return grads


class _Cudnn(_Form):
    """cuDNN's kernel for GPUs from Hopper on: no mask but causal. Keys and values may have fewer heads."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: _Block) -> tuple[Tensor, Tensor]:
        out, lse = _aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, block.causal, scale=block.mask.scale
        )[:2]
        return out, lse.reshape(q.shape[:3])

    def backward(
        self, dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, block: _Block
    ) -> tuple[Tensor, Tensor, Tensor]:
        unused = torch.empty((), dtype=torch.int64, device=q.device)
        state = (unused, unused, None, None, None, q.shape[2], k.shape[2], 0.0, block.causal)
        grads: tuple[Tensor, Tensor, Tensor] = _aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse[..., None], *state, scale=block.mask.scale
        )
        return grads


class _Efficient(_Form):
    """The memory-efficient kernel for GPUs: keys and values with a head for each query head, no mask but causal.

    With a mask that is added, its gradient in bf16 was wrong on an H100 (dq and dk; torch 2.11).
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: _Block) -> tuple[Tensor, Tensor]:
        keys, values = _repeated(q, k), _repeated(q, v)
        out, lse = _aten._scaled_dot_product_efficient_attention(
            q, keys, values, None, True, 0.0, block.causal, scale=block.mask.scale
        )[:2]
        return out, lse[:, :, : q.shape[2]]

    def backward(
        self, dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, block: _Block
    ) -> tuple[Tensor, Tensor, Tensor]:
        lse = F.pad(lse, (0, -lse.shape[2] % _LSE_ROWS), value=float("inf"))
        unused = torch.empty((), dtype=torch.int64, device=q.device)
        keys, values = _repeated(q, k), _repeated(q, v)
        # The kernel takes a row of all heads to lie in one piece, as its own forward leaves it, whatever strides say:
        # another provider's out, with tokens behind heads, was read beyond its end.
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
        state = (None, out, lse, unused, unused, 0.0, [True, True, True, False], block.causal)
        dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
            dout, q, keys, values, *state, scale=block.mask.scale
        )
        return dq, _summed(dk, k), _summed(dv, v)


class _FlashAttn(_Form):
    """FlashAttention 2 of the library flash-attn, where that is installed: causal, windows and a softcap. Heads stand
    behind tokens there. Its calls are tested against a stub, and have never run on a GPU."""

    whole_mask = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: _Block) -> tuple[Tensor, Tensor]:
        turned = [t.transpose(1, 2) for t in (q, k, v)]
        out, lse = _flash_attn()._flash_attn_forward(*turned, *self._mask(block.mask), None, False)[:2]
        return out.transpose(1, 2), lse

    def backward(
        self, dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, block: _Block
    ) -> tuple[Tensor, Tensor, Tensor]:
        turned = [t.transpose(1, 2).contiguous() for t in (dout, q, k, v, out)]
        grads = [torch.empty_like(t) for t in turned[1:4]]
        exact = torch.are_deterministic_algorithms_enabled()
        _flash_attn()._flash_attn_backward(*turned, lse.contiguous(), *grads, *self._mask(block.mask), None, exact)
        dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
        return dq, dk, dv

    @staticmethod
    def _mask(mask: Mask) -> tuple[float, float, bool, int, int, float]:
        """No dropout, the scale, causal, keys to the left and right of a query (-1: all), and the softcap (0: none)."""
        left = -1 if mask.window is None else mask.window - 1
        return 0.0, mask.scale, mask.causal, left, 0 if mask.causal else -1, mask.softcap or 0.0


def _flash_attn() -> Any:
    return importlib.import_module("flash_attn.flash_attn_interface")


class _Plain(_Form):
    """Matrix products and a softmax in at least f32; holds a block's scores."""

    whole_scores = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: _Block) -> tuple[Tensor, Tensor]:
        scores = self._scores(q, k, block.mask).masked_fill_(block.hidden[:, :, None], _HIDDEN)
        lse = scores.logsumexp(-1)
        weights = scores.sub_(self._finite(lse)[..., None]).exp_()
        out = torch.einsum("bgrst,bgte->bgrse", weights, wide(v))
        return out.flatten(1, 2), lse.flatten(1, 2)

    def backward(
        self, dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, block: _Block
    ) -> tuple[Tensor, Tensor, Tensor]:
        mask, grad = block.mask, _grouped(dout, k)
        scores = self._scores(q, k, mask)
        bend = None if mask.softcap is None else 1 - (scores / mask.softcap) ** 2
        scores = scores.masked_fill_(block.hidden[:, :, None], _HIDDEN)
        weights = scores.sub_(self._finite(_grouped(lse, k))[..., None]).exp_()
        delta = (grad * _grouped(out, k)).sum(-1, keepdim=True)
        dv = torch.einsum("bgrst,bgrse->bgte", weights, grad)
        dscores = torch.einsum("bgrse,bgte->bgrst", grad, wide(v)).sub_(delta).mul_(weights).mul_(mask.scale)
        if bend is not None:
            dscores.mul_(bend)
        dq = torch.einsum("bgrst,bgtd->bgrsd", dscores, wide(k)).flatten(1, 2)
        dk = torch.einsum("bgrst,bgrsd->bgtd", dscores, _grouped(q, k))
        return dq, dk, dv

    @staticmethod
    def _scores(q: Tensor, k: Tensor, mask: Mask) -> Tensor:
        """Scaled and capped scores [B, G, H/G, S, T]."""
        scores = torch.einsum("bgrsd,bgtd->bgrst", _grouped(q, k), wide(k)).mul_(mask.scale)
        return scores if mask.softcap is None else scores.div_(mask.softcap).tanh_().mul_(mask.softcap)

    @staticmethod
    def _finite(lse: Tensor) -> Tensor:
        """The lse with 0 for rows that see nothing: their weights are exp(-inf)."""
        return lse.masked_fill(lse == _HIDDEN, 0.0)


_PLAIN, _CPU, _FLASH, _CUDNN, _EFFICIENT = _Plain(), _Cpu(), _Flash(), _Cudnn(), _Efficient()
_FLASH_ATTN = _FlashAttn()


FORMS: dict[str, _Form] = {
    "cudnn": _CUDNN,
    "flash": _FLASH,
    "efficient": _EFFICIENT,
    "torch": _PLAIN,
    "flash-attn": _FLASH_ATTN,
}
"""What may be asked for on a GPU, by name."""
_said: set[str] = set()


def _form(q: Tensor, k: Tensor, v: Tensor, mask: Mask, by: str = "") -> _Form:
    """Which form runs: what is asked for, where it fits, else the fastest that does, which is said once."""
    found = _fastest(q, k, v, mask)
    if not by or q.device.type == "cpu" or FORMS[by] is found:
        return found
    if by == "torch" or (_takes_flash_attn(q, k, v, mask) if by == "flash-attn" else _takes(by, q, found)):
        return FORMS[by]
    if by not in _said:
        _said.add(by)
        name = next(name for name, form in FORMS.items() if form is found)
        where = f"q {list(q.shape)} {q.dtype} on {q.device}"
        warnings.warn(f"attention by {by} does not run here ({where}): {name} does", RuntimeWarning, stacklevel=4)
    return found


def _takes(by: str, q: Tensor, found: _Form) -> bool:
    """Whether another fused kernel than the fastest takes what that takes."""
    half = q.dtype in (torch.float16, torch.bfloat16)
    return found is not _PLAIN and (by == "efficient" or (by == "flash" and half))


def _takes_flash_attn(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> bool:
    """Whether the library is there and takes these heads and this mask."""
    heads = q.shape[3] == v.shape[3] and q.shape[3] % 8 == 0 and q.shape[3] <= 256
    known = mask.start is None and not mask.segments and mask.keys is None
    square = q.shape[2] == k.shape[2] or (not mask.causal and mask.window is None)
    half = q.dtype in (torch.float16, torch.bfloat16)
    return heads and known and square and half and importlib.util.find_spec("flash_attn") is not None


def _fastest(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> _Form:
    """The form to take where none is asked for; the same for an attention and its gradient."""
    even = q.shape[3] == v.shape[3] and mask.softcap is None
    if q.device.type == "cpu":
        return _CPU if even and q.dtype != torch.float16 else _PLAIN
    aligned = q.shape[3] % 8 == 0 and q.shape[3] <= 256
    square = q.shape[2] == k.shape[2] or not mask.causal
    if not (even and aligned and square and mask.simple):
        return _PLAIN
    if q.dtype in (torch.float16, torch.bfloat16):
        return _CUDNN if _takes_cudnn(q, k) else _FLASH
    return _EFFICIENT if q.dtype == torch.float32 else _PLAIN


def _takes_cudnn(q: Tensor, k: Tensor) -> bool:
    """Whether cuDNN's kernel runs, and is the faster one: it is on Hopper, and has no gradient above width 128."""
    usable = torch.backends.cuda.cudnn_sdp_enabled() and not torch.are_deterministic_algorithms_enabled()
    return usable and q.shape[3] <= 128 and min(q.shape[2], k.shape[2]) > 1 and _hopper(q.device.index)


@functools.cache
def _hopper(index: int) -> bool:
    """Whether a device is Hopper or later, with cuDNN at hand."""
    return torch.cuda.get_device_capability(index) >= (9, 0) and torch.backends.cudnn.is_available()


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
