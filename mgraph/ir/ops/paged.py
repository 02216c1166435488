"""The cache of keys and values of many sequences, in blocks of rows, and attention that reads it.

Tokens of several requests lie one after the other: those of request r are rows `starts[r] .. starts[r + 1]` of what is
computed. A request's rows of the cache lie in blocks of `block_size` rows each, `blocks[r]` in order; `lengths[r]` of
them are filled, the new tokens' rows included. Tokens behind the last request are padding (Kwon et al. 2023,
arXiv:2309.06180).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mgraph.ir.dims import divide
from mgraph.ir.graph import Node
from mgraph.ir.opdef import REQUIRED, define_op
from mgraph.ir.ops.attention import attention
from mgraph.ir.ops.cost import per_element, traffic, value_bytes
from mgraph.ir.ops.norm import rms_norm
from mgraph.ir.ops.rope import rope
from mgraph.ir.types import DType, TensorType

if TYPE_CHECKING:
    from torch import Tensor


def kv_append(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """The caches with the rows that `slots` names replaced by those of new tokens.

    keys [C, G, D], values [C, G, E], k [T, G, D], v [T, G, E], slots i64 [T] → keys, values. Padding tokens may name
    the same row; what it then holds is one of theirs.
    """
    made = keys.clone(), values.clone()
    for cache, new in zip(made, (k, v), strict=True):
        cache[slots] = new.to(cache.dtype)
    return made


def rope_kv_append(
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
) -> tuple[Tensor, Tensor, Tensor]:
    """`rope` of queries and keys, and `kv_append`; with weights [D] of queries and of keys `rms_norm` of both before.

    keys [C, G, D], values [C, G, E], q [T, H, D], k [T, G, D], v [T, G, E], slots i64 [T], cos and sin [T, D] or
    [T, D/2] → keys, values, q.
    """
    if weights:
        q, k = (rms_norm(x, w, eps=eps, offset=offset, round=round)[0] for x, w in zip((q, k), weights, strict=True))
    cos, sin = cos[:, None], sin[:, None]
    q, k = rope(q, cos, sin, style=style), rope(k, cos, sin, style=style)
    return *kv_append(keys, values, k, v, slots), q


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
    """Causal `attention` of the new tokens of each request over its rows of the cache.

    q [T, H, D], keys [C, G, D], values [C, G, E], starts i32 [R + 1], lengths i32 [R], blocks i32 [R, W], optional
    sinks [H] → [T, H, E]. The last of a request's n new tokens sits at position lengths[r] - 1. Tokens of no request
    give 0. Nothing else of the cache is read than the filled rows of requests, with a window none before that of the
    first new token.
    """
    out = q.new_zeros(*q.shape[:2], values.shape[2])
    for request, (begin, end) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        if begin == end:
            continue
        length = int(lengths[request])
        old = length - (end - begin)
        unseen = 0 if window is None else max(0, old + 1 - int(window))
        table = blocks[request, : -(-length // block_size)].long()
        rows = (table[:, None] * block_size + table.new_tensor(range(block_size))).flatten()[unseen:length]
        given = [t.transpose(0, 1)[None] for t in (q[begin:end], keys[rows], values[rows])]
        more = {"start": lengths.new_tensor(old - unseen).long(), **dict(zip(["sinks"], sinks, strict=False))}
        made, _ = attention(
            *given,
            *more.values(),
            scale=scale,
            causal=True,
            window=window,
            softcap=softcap,
            extra=tuple(more),
        )
        out[begin:end] = made[0].transpose(0, 1)
    return out


def _check_cache(what: str, keys: TensorType, values: TensorType, k: TensorType, v: TensorType) -> None:
    fits = all(len(t.shape) == 3 for t in (keys, values, k, v)) and keys.shape[:2] == values.shape[:2]
    if not fits or k.shape[:2] != v.shape[:2] or (keys.shape[1:], values.shape[1:]) != (k.shape[1:], v.shape[1:]):
        raise ValueError(f"{what}: keys {k} and values {v} do not fit the caches {keys} and {values}")


def _infer_kv_append(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    keys, values, k, v, slots = types
    _check_cache("kv_append", keys, values, k, v)
    if slots.shape != k.shape[:1] or slots.dtype is not DType.I64:
        raise ValueError(f"kv_append: slots {slots} are not a row of the cache for each token of {k}")
    return keys, values


def _infer_rope_kv_append(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    keys, values, q, k, v, slots, cos, sin, *weights = types
    _infer_kv_append((keys, values, k, v, slots), {})
    width = q.shape[-1]
    if len(q.shape) != 3 or q.shape[0] != k.shape[0] or width != k.shape[-1]:
        raise ValueError(f"rope_kv_append: queries {q} do not fit keys {k}")
    if cos.shape != sin.shape or cos.shape not in ((q.shape[0], width), (q.shape[0], divide(width, 2))):
        raise ValueError(f"rope_kv_append: tables {cos} and {sin} do not fit queries {q}")
    if len(weights) not in (0, 2) or any(w.shape != (width,) for w in weights):
        raise ValueError(f"rope_kv_append: weights {weights} are not those of norms of queries and keys")
    return keys, values, TensorType(q.dtype, q.shape)


def _infer_paged_attention(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    q, keys, values, starts, lengths, blocks, *sinks = types
    if any(len(t.shape) != 3 for t in (q, keys, values)) or keys.shape[:2] != values.shape[:2]:
        raise ValueError(f"paged_attention: q {q} and caches {keys} and {values} must have 3 dims and equal rows")
    if q.shape[2] != keys.shape[2] or divide(q.shape[1], keys.shape[1]) is None:
        raise ValueError(f"paged_attention: heads of q {q} do not fit those of {keys}")
    if (len(starts.shape), len(lengths.shape), len(blocks.shape)) != (1, 1, 2) or blocks.shape[0] != lengths.shape[0]:
        raise ValueError(f"paged_attention: starts {starts}, lengths {lengths} and blocks {blocks} do not fit")
    if len(sinks) > 1 or any(s.shape != (q.shape[1],) for s in sinks):
        raise ValueError(f"paged_attention: sinks {sinks} are not one score for each head of {q}")
    return (TensorType(q.dtype, (*q.shape[:2], values.shape[2])),)


def _moved(node: Node) -> Any:
    """Bytes of what is appended: read once, written once."""
    new = node.operands[2:5] if node.op.startswith("rope") else node.operands[2:4]
    return 2 * sum(map(value_bytes, new))


define_op("kv_append", kv_append, infer=_infer_kv_append, bytes=_moved)
define_op(
    "rope_kv_append",
    rope_kv_append,
    infer=_infer_rope_kv_append,
    attrs={"style": "half", "eps": 0.0, "offset": 0.0, "round": "product"},
    flops=per_element(8),
    bytes=_moved,
    updates=2,
    compute_dtype="f32",
)
define_op(
    "paged_attention",
    paged_attention,
    infer=_infer_paged_attention,
    attrs={"block_size": REQUIRED, "scale": REQUIRED, "window": None, "softcap": None},
    bytes=traffic,
    compute_dtype="f32",
)
