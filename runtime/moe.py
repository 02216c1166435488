"""Mixture of experts on torch: routing, dispatch, grouped products, combination, and their gradients.

T tokens, E experts, K experts a token, R = T*K rows sorted by expert. `offsets` i32[E] holds the cumulative end of each
expert's rows; an expert may have none. One sort per layer, gathers instead of scatters, and one fused product for all
experts where torch has one. A pair whose index is E is of no expert here (`others`): its row is behind all others, may
hold anything, and is not read by what is handed `offsets` beside `order`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mgraph.errors import PackageError
from mgraph.runtime import te_products
from mgraph.runtime.ops import wide

# The public name came after the private one; both take the same arguments.
_grouped_mm: Any = getattr(F, "grouped_mm", None) or torch._grouped_mm
_GROUPED_ALIGNMENT = 16  # bytes between rows that the fused grouped product asks for
_GROUPED_DTYPES = {"cuda": {torch.bfloat16}, "cpu": {torch.bfloat16, torch.float16, torch.float32}}
_aten: Any = torch.ops.aten


def moe_route(
    logits: Tensor,
    bias: Tensor | None = None,
    *,
    top_k: int,
    score: str = "softmax",
    renormalize: bool = False,
    epsilon: float = 0.0,
    scale: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
    group_best: int = 1,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Weights [T, K] in `dtype` and indices i64 [T, K] of each token's best experts; logits [T, E], bias [E].

    Scores are the softmax over all experts, over the chosen ones (`softmax_chosen`), or the sigmoid. The bias moves the
    choice alone. With `groups`, only the `top_groups` with the largest sums of their `group_best` best are chosen from.
    """
    scores = _scores(wide(logits), score)
    choice = scores if bias is None else scores + bias
    if groups > 1:
        grouped = choice.unflatten(1, (groups, -1))
        best = grouped.topk(group_best, -1).values.sum(-1).topk(top_groups, -1).indices
        closed = torch.ones(grouped.shape[:2], dtype=torch.bool, device=logits.device).scatter_(1, best, False)
        choice = grouped.masked_fill(closed[..., None], float("-inf")).flatten(1)
    weights, indices = choice.topk(top_k, -1)
    if bias is not None:
        weights = scores.gather(1, indices)
    return _weighed(weights, score, renormalize, epsilon, scale).to(dtype), indices


def moe_weigh(
    logits: Tensor,
    indices: Tensor,
    *,
    score: str = "softmax",
    renormalize: bool = False,
    epsilon: float = 0.0,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The weights [T, K] that `moe_route` gives these experts; logits [T, E], indices i64 [T, K]."""
    chosen = _scores(wide(logits), score).gather(1, indices)
    return _weighed(chosen, score, renormalize, epsilon, scale).to(dtype)


def _weighed(chosen: Tensor, score: str, renormalize: bool, epsilon: float, scale: float) -> Tensor:
    """Weights of chosen scores."""
    if score == "softmax_chosen":
        chosen = chosen.softmax(-1)
    if renormalize:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + epsilon)
    return chosen * scale if scale != 1.0 else chosen


def replay_choice(indices: Tensor, given: Tensor) -> Tensor:
    """The experts that are given (i16 [T, K]), and those that were chosen (i64 [T, K]) where `given` is -1."""
    return torch.where(given < 0, indices, given.long())


def stack_choices(choices: list[Tensor]) -> Tensor:
    """The decisions of L routers, that of the last one first, i16 [T, K] each, as [T, L, K] in their order."""
    return torch.stack(choices[::-1], 1)


def _scores(logits: Tensor, score: str) -> Tensor:
    if score == "softmax_chosen":
        return logits
    return logits.softmax(-1) if score == "softmax" else logits.sigmoid()


def moe_route_grad(
    dweights: Tensor,
    logits: Tensor,
    indices: Tensor,
    *,
    score: str = "softmax",
    renormalize: bool = False,
    epsilon: float = 0.0,
    scale: float = 1.0,
) -> Tensor:
    """Gradient of `moe_route` for the logits, the choice held fixed."""
    values, grad = wide(logits), wide(dweights)
    grad = grad * scale if scale != 1.0 else grad
    if score == "softmax" and renormalize and epsilon == 0:
        score, renormalize = "softmax_chosen", False  # the same weights, from the chosen logits alone
    if score == "softmax_chosen":
        chosen = values.gather(1, indices).softmax(-1)
    else:
        values = _scores(values, score)
        chosen = values.gather(1, indices)
    if renormalize:
        total = chosen.sum(-1, keepdim=True) + epsilon
        grad = (grad - torch.linalg.vecdot(grad, chosen)[:, None] / total) / total
    if score == "softmax":
        grad = torch.zeros_like(values).scatter_(1, indices, grad)
        dense: Tensor = _aten._softmax_backward_data(grad, values, -1, values.dtype)
        return dense.to(logits.dtype)
    if score == "sigmoid":
        picked = _aten.sigmoid_backward(grad, chosen)
    else:
        picked = _aten._softmax_backward_data(grad, chosen, -1, chosen.dtype)
    return torch.zeros_like(values).scatter_(1, indices, picked).to(logits.dtype)


def moe_order(indices: Tensor, *, num_experts: int, others: bool = False) -> tuple[Tensor, Tensor]:
    """Pairs of token and choice by expert, then by token: order i64 [T*K], cumulative ends i32 [E]; indices [T, K].

    Raises PackageError on the CPU, where a look costs nothing, for the number of an expert that there is not; elsewhere
    such a pair is of no expert, as those of E are.
    """
    check_choices(indices, num_experts)
    return _by_expert(indices.flatten(), num_experts)


def check_choices(indices: Tensor, num_experts: int) -> None:
    """Raises PackageError on the CPU for the number of an expert that there is not; E, which drops, is none such."""
    if indices.device.type == "cpu" and indices.numel():
        low, high = (int(number) for number in torch.aminmax(indices))
        if low < 0 or high > num_experts:
            raise PackageError(
                f"a router chose expert {low if low < 0 else high}, and the experts are 0 to {num_experts - 1}",
                hint="mend the router of the model, and compile it again",
            )


def _by_expert(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The order of `moe_order` and the ends; numbers of no expert come last."""
    chosen = chosen.clamp(-1, num_experts).remainder(num_experts + 1)  # -1 becomes E
    # A GPU sorts byte by byte: two of them take a quarter of the time of eight.
    chosen = chosen.to(torch.int16 if num_experts < 2**15 else torch.int64)
    by_expert, order = chosen.sort(stable=True)
    experts = torch.arange(num_experts, dtype=chosen.dtype, device=chosen.device)
    return order, torch.searchsorted(by_expert, experts, right=True, out_int32=True)


def moe_dispatch(
    x: Tensor, indices: Tensor, *, num_experts: int, others: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Each token once per expert of its, sorted by expert: rows [T*K, N], and `moe_order`."""
    order, offsets = moe_order(indices, num_experts=num_experts)
    return x.index_select(0, order // indices.shape[1]), order, offsets


def moe_dispatch_grad(drows: Tensor, order: Tensor, *extra: Tensor, top_k: int, others: bool = False) -> Tensor:
    """Gradient of `moe_dispatch` for x: the sum of a token's rows, those of drows and of more [T*K, N].

    `extra`: offsets with `others`, then more, if there is any.
    """
    places = inverse(order).view(-1, top_k)
    terms = [drows, *extra[others:]]
    if others:
        terms = [of_experts(rows, extra[0]) for rows in terms]
    if len(terms) == 1:
        dx: Tensor = F.embedding_bag(places, terms[0], mode="sum")
        return dx
    first, second = (F.embedding_bag(places, wide(rows), mode="sum") for rows in terms)
    return first.add_(second).to(drows.dtype)


def moe_combine(
    rows: Tensor, weights: Tensor, order: Tensor, offsets: Tensor | None = None, *, dtype: torch.dtype
) -> Tensor:
    """`y[t] = sum over k of weights[t, k] * rows[r]` for the rows r of token t, [T, N]; products are in `dtype`."""
    rows = rows if offsets is None else of_experts(rows, offsets)
    places = inverse(order).view(weights.shape)
    if rows.dtype == weights.dtype == dtype:
        return F.embedding_bag(places, rows, per_sample_weights=weights, mode="sum")
    products = (wide(rows)[places] * wide(weights)[..., None]).to(dtype)
    return wide(products).sum(1).to(rows.dtype)


def moe_combine_grad(
    dy: Tensor, rows: Tensor, weights: Tensor, order: Tensor, offsets: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients of `moe_combine` for rows and weights."""
    grad = dy.index_select(0, order // weights.shape[1])
    dots = torch.linalg.vecdot(wide(grad), wide(rows))
    dots = dots if offsets is None else of_experts(dots, offsets)
    dots = dots.index_select(0, inverse(order)).view(weights.shape)
    drows = grad.mul_(weights.flatten()[order, None].to(grad.dtype))
    return drows, dots.to(weights.dtype)


def of_experts(rows: Tensor, offsets: Tensor) -> Tensor:
    """rows [R, N] or [R] with 0 for those of no expert, from offsets[-1] on (i32 [E], cumulative ends)."""
    real = torch.arange(rows.shape[0], device=rows.device) < offsets[-1]
    return rows.where(real.view(-1, *[1] * (rows.dim() - 1)), 0.0)


def grouped_mm(rows: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None = None, by: str = "") -> Tensor:
    """Matrix products of consecutive groups of rows; `offsets` i32[E] holds the cumulative end of each group.

    With weight [E, K, N], rows [R, K] give [R, N]: `out[r] = rows[r] @ weight[e] + bias[e]` for the group e that r lies
    in, bias [E, N]; rows past the last end are zero or undefined. With weight [R, N], rows [K, R] (as in a weight
    gradient) give [E, K, N]: `out[e] = rows[:, group e] @ weight[group e]`, without a bias.

    Operands may be transposed views. One fused call where torch has one for the dtype and strides, else one product
    per group. `by="te"` takes Transformer Engine's, where that is installed and fits.
    """
    if by == "te" and te_products.fits(rows, weight):
        product = te_products.grouped_mm(rows, weight, offsets)
        return product if bias is None else product.add_(_spread(bias, offsets, rows.shape[0]))
    aligned = all(_is_aligned(operand) for operand in (rows, weight))
    if aligned and rows.dtype in _GROUPED_DTYPES.get(rows.device.type, set()):
        fused: Tensor = _grouped_mm(rows, weight, offs=offsets)
        return fused if bias is None else fused.add_(_spread(bias, offsets, rows.shape[0]))
    ends = _on_host(offsets, rows.dtype)
    starts = [0, *ends[:-1]]
    if weight.dim() == 2:
        stacked = rows.new_empty(len(ends), rows.shape[0], weight.shape[1])
        for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
            torch.mm(rows[:, start:end], weight[start:end], out=stacked[index])
        return stacked
    out = rows.new_empty(rows.shape[0], weight.shape[2])
    for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if start == end:
            continue
        if bias is None:
            torch.mm(rows[start:end], weight[index], out=out[start:end])
        else:
            torch.addmm(bias[index], rows[start:end], weight[index], out=out[start:end])
    return out


def _on_host(offsets: Tensor, dtype: torch.dtype) -> list[int]:
    """The ends of groups, for which the host waits. Raises PackageError where a CUDA graph is captured."""
    if offsets.is_cuda and torch.cuda.is_current_stream_capturing():
        raise PackageError(
            f"torch multiplies groups of {str(dtype).removeprefix('torch.')} one after the other, and the host reads"
            " where each one ends",
            hint="compile the package for this GPU, which has a kernel for them where widths are multiples of 16",
        )
    ends: list[int] = offsets.tolist()
    return ends


def _spread(bias: Tensor, offsets: Tensor, rows: int) -> Tensor:
    """The row of bias [E, N] that belongs to each of `rows` rows; past the last end, that of the last group."""
    places = torch.arange(rows, dtype=offsets.dtype, device=offsets.device)
    group = torch.searchsorted(offsets, places, right=True, out_int32=True)
    return bias.index_select(0, group.clamp_(max=bias.shape[0] - 1))


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


def grouped_sum(rows: Tensor, offsets: Tensor) -> Tensor:
    """Sums of consecutive groups of rows: rows [R, N] give [E, N], zero for a group without rows.

    On a GPU nothing looks at the offsets, and nothing is added by atomics: it is a product with ones, where torch has
    one for all groups.
    """
    if rows.is_cuda and rows.dtype not in _GROUPED_DTYPES["cuda"]:
        starts = F.pad(offsets, (1, 0))
        sums: Tensor = torch.segment_reduce(rows, "sum", offsets=starts, axis=0, unsafe=True, initial=0)
        return sums
    if rows.is_cuda:
        ones = rows.new_ones(rows.shape[0], _GROUPED_ALIGNMENT // rows.element_size())
        return grouped_mm(ones.t(), rows, offsets)[:, 0]
    out = rows.new_empty(offsets.shape[0], rows.shape[1])
    start = 0
    for index, end in enumerate(offsets.tolist()):
        torch.sum(rows[start:end], 0, out=out[index])
        start = end
    return out


def grouped_outer_(total: Tensor, left: Tensor, right: Tensor, offsets: Tensor, *, fresh: bool = False) -> Tensor:
    """Add to total [E, N, F] the products `left[group e]' @ right[group e]`, in place; `fresh`: as if it were zeros.

    left [R, N], right [R, F]; `offsets` i32 [E] holds the cumulative end of each group of rows.
    """
    if total.is_cuda or total.dtype != left.dtype:
        made = grouped_mm(left.t(), right, offsets)
        return total.copy_(made) if fresh else total.add_(made)
    start = 0
    for product, end in zip(total, offsets.tolist(), strict=True):
        if fresh or end > start:
            product.addmm_(left[start:end].t(), right[start:end], beta=0 if fresh else 1)
        start = end
    return total


def expert_counts(indices: Tensor, *, num_experts: int) -> Tensor:
    """How often each expert was chosen: indices i64[T, K] -> i64[E]; E, for what was dropped, and all else that is no
    expert's number are not counted."""
    chosen = indices.flatten()
    chosen = chosen.where((chosen >= 0) & (chosen < num_experts), num_experts)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=indices.device)
    return counts.index_add_(0, chosen, torch.ones_like(chosen))[:-1]


def expert_bias_update_(biases: list[Tensor], loads: list[Tensor], finite: Tensor, *, rate: float) -> None:
    """Add `rate * sign(mean load - load)` to each bias [E], in place, if the step is `finite`; loads are i64[E]."""
    for bias, load in zip(biases, loads, strict=True):
        sign = torch.sign(load.sum() - load.numel() * load) * finite
        bias.add_(sign.to(bias.dtype), alpha=rate)


def inverse(order: Tensor) -> Tensor:
    """The inverse permutation."""
    places = torch.empty_like(order)
    places[order] = torch.arange(order.shape[0], device=order.device)
    return places
