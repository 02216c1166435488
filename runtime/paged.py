"""The paged cache of keys and values, and attention over it, on torch.

A step computes T tokens of R requests, one request after the other. keys [C, G, D] and values [C, G, E] are the caches
of a layer: C rows in blocks of `block_size`. See `mgraph.runtime.serving.step` for starts, lengths, blocks and slots.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mgraph.runtime import invariant
from mgraph.runtime.attention import attention
from mgraph.runtime.norm import norm_rope
from mgraph.runtime.ops import rope


def kv_append_(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Write k [T, G, D] and v [T, G, E] into the rows of the caches that slots i64 [T] names, in place."""
    keys.index_copy_(0, slots, k.to(keys.dtype))
    values.index_copy_(0, slots, v.to(values.dtype))


def rope_kv_append_(
    keys: Tensor,
    values: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    *weights: Tensor,
    style: str = "half",
    eps: float = 0.0,
    offset: float = 0.0,
    round: str = "product",
) -> Tensor:
    """`kv_append_` of rotated keys; gives the queries q [T, H, D], rotated too. cos and sin are [T, D] or [T, D/2].

    With weights [D], of queries and of keys, both are RMS-normalised before.
    """
    cos, sin = cos[:, None], sin[:, None]
    if weights:
        q, k = (
            norm_rope(x, weight, cos, sin, eps=eps, offset=offset, round=round, style=style)[0]
            for x, weight in zip((q, k), weights, strict=True)
        )
    else:
        q, k = (rope(x, cos, sin, style=style) for x in (q, k))
    kv_append_(keys, values, k, v, slots)
    return q


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    lengths: Tensor,
    blocks: Tensor,
    *sinks: Tensor,
    block_size: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention of each request's new tokens over its filled rows of the cache: q [T, H, D] → [T, H, E].

    Request by request, its rows gathered; tokens of no request give 0. The host reads starts and lengths, so on a GPU
    this waits for the device and is in no CUDA graph.
    """
    if invariant.active():
        sight = {"scale": scale, "window": window, "softcap": softcap}
        return _by_position(q, keys, values, starts.tolist(), lengths.tolist(), blocks, sinks, block_size, sight)
    out = q.new_zeros(q.shape[0], q.shape[1], values.shape[2])
    bounds = starts.tolist()
    within = torch.arange(block_size, device=q.device)
    for request, length in enumerate(lengths.tolist()):
        begin, end = bounds[request : request + 2]
        if begin == end:
            continue
        old = length - (end - begin)
        # What no new token's window reaches is not gathered.
        skipped = 0 if window is None else max(0, old + 1 - window)
        first = skipped // block_size
        table = blocks[request, first : -(-length // block_size)]
        rows = (table[:, None] * block_size + within).flatten()[skipped - first * block_size :][: length - skipped]
        read = q[begin:end], keys.index_select(0, rows), values.index_select(0, rows)
        given = [t.transpose(0, 1)[None] for t in read]
        more = dict(zip(["sinks"], sinks, strict=False))
        alone = end - begin == 1  # sees all that was gathered
        if not alone and old > skipped:
            more["start"] = torch.tensor(old - skipped, device=q.device)
        made, _ = attention(
            *given,
            *more.values(),
            scale=scale,
            causal=not alone,
            window=None if alone else window,
            softcap=softcap,
            extra=tuple(more),
        )
        out[begin:end] = made[0].transpose(0, 1)
    return out


def _by_position(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: list[int],
    lengths: list[int],
    blocks: Tensor,
    sinks: tuple[Tensor, ...],
    block_size: int,
    sight: dict[str, Any],
) -> Tensor:
    """`paged_attention` in shapes that follow from a token's position alone: `ROWS` positions of a request at a time,
    counted from its beginning, each in its row, over the keys up to the last of them. What is not there is 0."""
    out = q.new_zeros(q.shape[0], q.shape[1], values.shape[2])
    within = torch.arange(block_size, device=q.device)
    size, window = invariant.ROWS, sight["window"]
    with invariant.as_it_is():
        for request, length in enumerate(lengths):
            begin, end = starts[request : request + 2]
            old = length - (end - begin)
            for first in range(old // size * size, length if end > begin else 0, size):
                low = 0 if window is None else max(0, first + 1 - window)
                high = min(first + size, length)
                # What the first new token does not see may have gone; no query of this step sees it either.
                kept = low if window is None else max(low, old + 1 - window)
                table = blocks[request, kept // block_size : -(-high // block_size)]
                held = (table[:, None] * block_size + within).flatten()[kept % block_size :][: high - kept]
                seen = []
                for cache in (keys, values):
                    rows = cache.new_zeros(first + size - low, *cache.shape[1:])
                    rows[kept - low : high - low] = cache.index_select(0, held)
                    seen.append(rows.transpose(0, 1)[None])
                here = max(first, old)
                queries = q.new_zeros(size, *q.shape[1:])
                queries[here - first : high - first] = q[begin + here - old : begin + high - old]
                start = torch.tensor(first - low, device=q.device)
                extra = ("start", "sinks")[: 1 + len(sinks)]
                more = start, *sinks
                given = queries.transpose(0, 1)[None], *seen
                made, _ = attention(*given, *more, causal=True, extra=extra, **sight)
                out[begin + here - old : begin + high - old] = made[0].transpose(0, 1)[here - first : high - first]
    return out
