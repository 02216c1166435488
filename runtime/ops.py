"""The semantic ops of a step on torch: attention, gated units, rotary embedding, cross entropy, mixture of experts.

Each takes the fastest form torch has for device, dtype and shape, and a plain form where none fits; all forms mean the
same. Gradients come as functions of their own, so that a step needs no autograd. Shapes are named as in the docstrings:
B batch, H query heads, G key heads, S queries, T keys (or tokens), N rows, V vocabulary, E experts, K experts a token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 18
"""Rows of logits are taken in pieces of about this many elements: temporaries stay in the processor's cache."""
_CHUNK_ELEMENTS_CUDA = 1 << 26

# The public name came after the private one; both take the same arguments.
_grouped_mm: Any = getattr(F, "grouped_mm", None) or torch._grouped_mm
_GROUPED_ALIGNMENT = 16  # bytes between rows that the fused grouped product asks for
_GROUPED_DTYPES = {"cuda": {torch.bfloat16}, "cpu": {torch.bfloat16, torch.float16, torch.float32}}
_aten: Any = torch.ops.aten


def wide(tensor: Tensor) -> Tensor:
    """At least f32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def device(state: dict[str, Tensor]) -> torch.device:
    """Where the state lies."""
    return next(iter(state.values())).device


def glu(gate: Tensor, up: Tensor, *, act: str) -> Tensor:
    """`act(gate) * up`; act is `silu`, `gelu_tanh` or `gelu_erf`."""
    return _activate(gate, act).mul_(up)


def glu_grad(dy: Tensor, gate: Tensor, up: Tensor, *, act: str) -> tuple[Tensor, Tensor]:
    """Gradients of `glu` for gate and up; no tensor is made beside these two."""
    dup = _activate(gate, act).mul_(dy)
    dgate = dy * up
    if act == "silu":
        _aten.silu_backward.grad_input(dgate, gate, grad_input=dgate)
    else:
        _aten.gelu_backward.grad_input(dgate, gate, approximate=_GELU[act], grad_input=dgate)
    return dgate, dup


_GELU = {"gelu_tanh": "tanh", "gelu_erf": "none"}


def _activate(gate: Tensor, act: str) -> Tensor:
    return F.silu(gate) if act == "silu" else F.gelu(gate, approximate=_GELU[act])


def _pairs(style: str, width: int) -> tuple[slice, slice]:
    """Where the first and the second elements of the pairs are that turn together."""
    halves = slice(None, width // 2), slice(width // 2, None)
    return halves if style == "half" else (slice(0, None, 2), slice(1, None, 2))


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, style: str = "half", inverse: bool = False) -> Tensor:
    """Rotate pairs (a, b) of the last dim: `x * cos + (-b, a) * sin`; `inverse` is the transposed map.

    Pairs are element i of both halves, or neighbours (`interleaved`). cos and sin broadcast against x, in its width or
    half of it. Computed in at least f32.
    """
    values, cos, sin = wide(x), wide(cos), wide(sin)
    first, second = _pairs(style, x.shape[-1])
    narrow = cos.shape[-1] * 2 == x.shape[-1]
    if narrow:
        cos = torch.cat((cos, cos), -1) if style == "half" else cos.repeat_interleave(2, -1)
    sin_first, sin_second = (sin, sin) if narrow else (sin[..., first], sin[..., second])
    if inverse:
        sin_first, sin_second = sin_second, sin_first
    sign = 1 if inverse else -1
    out = values * cos
    out[..., first].addcmul_(values[..., second], sin_first, value=sign)
    out[..., second].addcmul_(values[..., first], sin_second, value=-sign)
    return out.to(x.dtype)


def rope_table_grad(dy: Tensor, x: Tensor, cos: Tensor, sin: Tensor, *, style: str = "half") -> tuple[Tensor, Tensor]:
    """Gradients of `rope` for its tables, summed where they were broadcast."""
    grad, values = wide(dy), wide(x)
    first, second = _pairs(style, x.shape[-1])
    dcos, dsin = grad * values, torch.empty_like(grad)
    torch.mul(grad[..., first], values[..., second].neg(), out=dsin[..., first])
    torch.mul(grad[..., second], values[..., first], out=dsin[..., second])
    if cos.shape[-1] * 2 == x.shape[-1]:
        dcos, dsin = (d[..., first] + d[..., second] for d in (dcos, dsin))
    return dcos.sum_to_size(cos.shape).to(cos.dtype), dsin.sum_to_size(sin.shape).to(sin.dtype)


def cross_entropy(logits: Tensor, labels: Tensor, *, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """Sum over rows with `label != ignore_index` of `lse - logits[label]`, and lse = log sum exp (N).

    logits [N, V], labels i64 [N]. Rows are taken in pieces, so that no second [N, V] tensor is made.
    """
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    lse = torch.empty(logits.shape[0], dtype=dtype, device=logits.device)
    step = _chunk_rows(logits)
    for start in range(0, logits.shape[0], step):
        rows = slice(start, start + step)
        torch.logsumexp(wide(logits[rows]), -1, out=lse[rows])
    counted = labels != ignore_index
    picked = logits.gather(1, labels.where(counted, 0)[:, None])[:, 0]
    return (lse - picked).where(counted, 0).sum(), lse


def cross_entropy_grad(
    dsum: Tensor, logits: Tensor, labels: Tensor, lse: Tensor, *, ignore_index: int = -100, out: Tensor | None = None
) -> Tensor:
    """Gradient of `cross_entropy`: `dsum * (exp(logits - lse) - onehot(label))`, zero in ignored rows.

    `out` may be `logits` itself, which is then overwritten.
    """
    out = torch.empty_like(logits) if out is None else out
    counted = labels != ignore_index
    scale = (dsum * counted)[:, None]
    columns = labels.where(counted, 0)[:, None]
    step = _chunk_rows(logits)
    for start in range(0, logits.shape[0], step):
        rows = slice(start, start + step)
        piece = out[rows] if out.dtype == lse.dtype else torch.empty_like(out[rows], dtype=lse.dtype)
        torch.sub(logits[rows], lse[rows, None], out=piece).exp_()
        piece.scatter_add_(1, columns[rows], piece.new_full((1, 1), -1.0).expand(piece.shape[0], 1))
        torch.mul(piece, scale[rows], out=out[rows])
    return out


def _chunk_rows(logits: Tensor) -> int:
    elements = _CHUNK_ELEMENTS_CUDA if logits.is_cuda else _CHUNK_ELEMENTS
    return max(1, elements // logits.shape[1])


def moe_route(
    logits: Tensor,
    *,
    top_k: int,
    renormalize: bool = False,
    pre_softmax: bool = True,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Weights [T, K] in `dtype` and indices i64 [T, K] of each token's best experts; logits [T, E].

    The softmax runs over all experts before the choice (`pre_softmax`) or over the chosen ones after it.
    """
    scores = wide(logits).softmax(-1) if pre_softmax else wide(logits)
    weights, indices = scores.topk(top_k, -1)
    weights = weights if pre_softmax else weights.softmax(-1)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(dtype), indices


def moe_route_grad(
    dweights: Tensor, logits: Tensor, indices: Tensor, *, renormalize: bool = False, pre_softmax: bool = True
) -> Tensor:
    """Gradient of `moe_route` for the logits, the choice held fixed: that of a softmax, over the chosen experts where
    the weights sum to 1, else over all with zero for the others."""
    scores, grad = wide(logits), wide(dweights)
    chosen_only = renormalize or not pre_softmax
    if chosen_only:
        scores = scores.gather(1, indices)
    else:
        grad = torch.zeros_like(scores).scatter_(1, indices, grad)
    scores = scores.softmax(-1)
    dlogits: Tensor = _aten._softmax_backward_data(grad, scores, -1, scores.dtype)
    if chosen_only:
        dlogits = torch.zeros_like(logits, dtype=dlogits.dtype).scatter_(1, indices, dlogits)
    return dlogits.to(logits.dtype)


def moe_dispatch(x: Tensor, indices: Tensor, *, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Each token once per expert of its, sorted by expert: rows [T*K, N], order i64 [T*K], cumulative ends i32 [E]."""
    by_expert, order = indices.flatten().sort(stable=True)
    experts = torch.arange(num_experts, device=x.device)
    offsets = torch.searchsorted(by_expert, experts, right=True, out_int32=True)
    return x.index_select(0, order // indices.shape[1]), order, offsets


def moe_dispatch_grad(drows: Tensor, order: Tensor, *, top_k: int) -> Tensor:
    """Gradient of `moe_dispatch` for x: the sum of a token's rows."""
    dx: Tensor = F.embedding_bag(inverse(order).view(-1, top_k), drows, mode="sum")
    return dx


def moe_combine(rows: Tensor, weights: Tensor, order: Tensor, *, dtype: torch.dtype) -> Tensor:
    """`y[t] = sum over k of weights[t, k] * rows[r]` for the rows r of token t, [T, N]; products are in `dtype`."""
    places = inverse(order).view(weights.shape)
    if rows.dtype == weights.dtype == dtype:
        return F.embedding_bag(places, rows, per_sample_weights=weights, mode="sum")
    products = (wide(rows)[places] * wide(weights)[..., None]).to(dtype)
    return wide(products).sum(1).to(rows.dtype)


def moe_combine_grad(dy: Tensor, rows: Tensor, weights: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `moe_combine` for rows and weights."""
    grad = dy.index_select(0, order // weights.shape[1])
    dots = torch.linalg.vecdot(wide(grad), wide(rows)).index_select(0, inverse(order)).view(weights.shape)
    drows = grad.mul_(weights.flatten()[order, None].to(grad.dtype))
    return drows, dots.to(weights.dtype)


def grouped_mm(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Matrix products of consecutive groups of rows; `offsets` i32[E] holds the cumulative end of each group.

    With weight [E, K, N], rows [R, K] give [R, N]: `out[r] = rows[r] @ weight[e]` for the group e that r lies in; rows
    past the last end are zero or undefined. With weight [R, N], rows [K, R] (as in a weight gradient) give [E, K, N]:
    `out[e] = rows[:, group e] @ weight[group e]`.

    Operands may be transposed views. One fused call where torch has one for the dtype and strides, else one product
    per group.
    """
    aligned = all(_is_aligned(operand) for operand in (rows, weight))
    if aligned and rows.dtype in _GROUPED_DTYPES.get(rows.device.type, set()):
        fused: Tensor = _grouped_mm(rows, weight, offs=offsets)
        return fused
    ends = offsets.tolist()
    starts = [0, *ends[:-1]]
    if weight.dim() == 2:
        stacked = rows.new_empty(len(ends), rows.shape[0], weight.shape[1])
        for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
            torch.mm(rows[:, start:end], weight[start:end], out=stacked[index])
        return stacked
    out = rows.new_empty(rows.shape[0], weight.shape[2])
    for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
        torch.mm(rows[start:end], weight[index], out=out[start:end])
    return out


def _is_aligned(operand: Tensor) -> bool:
    """Whether the last two dims are laid out densely one way round, with 16-byte distances and start."""
    step = _GROUPED_ALIGNMENT // operand.element_size()
    inner, outer = sorted(operand.stride()[-2:])
    batch = operand.stride()[:-2]
    return (
        operand.numel() > 0
        and inner == 1
        and outer % step == 0
        and all(stride % step == 0 for stride in batch)
        and operand.storage_offset() % step == 0
    )


def grouped_outer_(total: Tensor, left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """Add to total [E, N, F] the products `left[group e]' @ right[group e]`, in place.

    left [R, N], right [R, F]; `offsets` i32 [E] holds the cumulative end of each group of rows.
    """
    if total.is_cuda or total.dtype != left.dtype:
        return total.add_(grouped_mm(left.t(), right, offsets))
    start = 0
    for product, end in zip(total, offsets.tolist(), strict=True):
        if end > start:
            product.addmm_(left[start:end].t(), right[start:end])
        start = end
    return total


def embedding_grad_(total: Tensor, grad: Tensor, indices: Tensor) -> Tensor:
    """Add each row of grad [..., N] to the row of total [V, N] that its index names, in place."""
    return total.index_add_(0, indices.reshape(-1), grad.reshape(-1, grad.shape[-1]).to(total.dtype))


def inverse(order: Tensor) -> Tensor:
    """The inverse permutation."""
    places = torch.empty_like(order)
    places[order] = torch.arange(order.shape[0], device=order.device)
    return places


def kv_append_(cache: Tensor, new: Tensor, start: Tensor) -> Tensor:
    """Write `new` [B, G, S, D] into `cache` [B, G, T, D] from position `start` i64[] on, in place."""
    places = torch.arange(new.shape[2], device=new.device) + start
    return cache.index_copy_(2, places, new.to(cache.dtype))


def global_norm(tensors: list[Tensor]) -> Tensor:
    """The 2-norm of all tensors together, in at least f32."""
    dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors, 2, dtype)))
    return norm


def gradient_scale(norm: Tensor, count: Tensor, *, max_norm: float) -> tuple[Tensor, Tensor]:
    """The factor on gradients of a loss summed over `count` tokens, clipped to `max_norm` (0: not); norm / count."""
    tokens = count.clamp(min=1).to(norm.dtype)
    mean_norm = norm / tokens
    clip = torch.clamp(max_norm / (mean_norm + 1e-6), max=1.0) if max_norm > 0 else torch.ones_like(norm)
    return clip / tokens, mean_norm


def copy_(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into its target, rounding to the target's dtype."""
    torch._foreach_copy_(targets, sources)


def zero_(tensors: list[Tensor]) -> None:
    """Set all tensors to zero."""
    torch._foreach_zero_(tensors)
