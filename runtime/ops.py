"""The semantic ops of a step on torch: gated units, rotary embedding, cross entropy, and what an update needs.

Each takes the fastest form torch has for device, dtype and shape, and a plain form where none fits; all forms mean the
same. Gradients come as functions of their own, so that a step needs no autograd. Shapes are named as in the docstrings:
B batch, H query heads, G key heads, S queries, T keys, N rows, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mgraph.runtime.cublas_lt import sum_of

_CHUNK_ELEMENTS = 1 << 18
"""Rows of logits are taken in pieces of about this many elements: temporaries stay in the processor's cache."""
_CHUNK_ELEMENTS_CUDA = 1 << 26

_aten: Any = torch.ops.aten


def wide(tensor: Tensor) -> Tensor:
    """At least f32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def device(state: dict[str, Tensor]) -> torch.device:
    """Where the state lies."""
    return next(iter(state.values())).device


def glu(
    gate: Tensor,
    up: Tensor,
    *,
    act: str,
    alpha: float = 1.702,
    limit: float = 0.0,
    offset: float = 0.0,
    spaced: bool = False,
) -> Tensor:
    """`act(gate) * (up + offset)`; act is `silu`, `gelu_tanh`, `gelu_erf` or `quick_gelu` (`x * sigmoid(alpha x)`).

    With a limit, gate is first cut to at most that and up to both sides. `spaced`, for kernels, changes no number.
    """
    gate, up = _clamped(gate, up, limit)
    return _activate(gate, act, alpha).mul_(up + offset if offset else up)


def glu_grad(
    dy: Tensor,
    gate: Tensor,
    up: Tensor,
    *,
    act: str,
    alpha: float = 1.702,
    limit: float = 0.0,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Gradients of `glu` for gate and up; for silu and gelu no tensor is made beside these two."""
    cut_gate, cut_up = _clamped(gate, up, limit)
    dup = _activate(cut_gate, act, alpha).mul_(dy)
    dgate = dy * (cut_up + offset if offset else cut_up)
    if act in _GELU:
        _aten.gelu_backward.grad_input(dgate, cut_gate, approximate=_GELU[act], grad_input=dgate)
    else:  # alpha times the quick form is the silu of alpha times its argument
        _aten.silu_backward.grad_input(dgate, cut_gate if act == "silu" else alpha * cut_gate, grad_input=dgate)
    if limit:
        dgate.masked_fill_(gate > limit, 0)
        dup.masked_fill_(up.abs() > limit, 0)
    return dgate, dup


_GELU = {"gelu_tanh": "tanh", "gelu_erf": "none"}


def _clamped(gate: Tensor, up: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    return (gate.clamp(max=limit), up.clamp(-limit, limit)) if limit else (gate, up)


def _activate(gate: Tensor, act: str, alpha: float) -> Tensor:
    if act == "quick_gelu":
        return (alpha * gate).sigmoid_().mul_(gate)
    return F.silu(gate) if act == "silu" else F.gelu(gate, approximate=_GELU[act])


def squared_relu(x: Tensor) -> Tensor:
    """`max(x, 0)` squared."""
    return F.relu(x).square_()


def squared_relu_grad(dy: Tensor, x: Tensor) -> Tensor:
    """Gradient of `squared_relu`."""
    return F.relu(x).mul_(dy).mul_(2)


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


def cross_entropy(
    logits: Tensor, labels: Tensor, *, ignore_index: int = -100, classes: int = 0
) -> tuple[Tensor, Tensor]:
    """Sum over rows with `label != ignore_index` of `lse - logits[label]`, and lse = log sum exp (N).

    logits [N, V], labels i64 [N]; columns from `classes` on, if it is not 0, are padding. Rows are taken in pieces, so
    that no second [N, V] tensor is made.
    """
    logits = logits[:, : classes or None]
    lse = row_lse(logits)
    counted = labels != ignore_index
    picked = logits.gather(1, labels.where(counted, 0)[:, None])[:, 0]
    return (lse - picked).where(counted, 0).sum(), lse


def cross_entropy_grad(
    dsum: Tensor,
    logits: Tensor,
    labels: Tensor,
    lse: Tensor,
    *,
    ignore_index: int = -100,
    classes: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Gradient of `cross_entropy`: `dsum * (exp(logits - lse) - onehot(label))`, zero in ignored rows and padding.

    `out` may be `logits` itself, which is then overwritten.
    """
    whole = torch.empty_like(logits) if out is None else out
    classes = classes or logits.shape[1]
    whole[:, classes:] = 0
    logits, out = logits[:, :classes], whole[:, :classes]
    counted = labels != ignore_index
    scale = (dsum * counted)[:, None]
    columns = labels.where(counted, 0)[:, None]
    step = chunk_rows(logits)
    for start in range(0, logits.shape[0], step):
        rows = slice(start, start + step)
        piece = out[rows] if out.dtype == lse.dtype else torch.empty_like(out[rows], dtype=lse.dtype)
        torch.sub(logits[rows], lse[rows, None], out=piece).exp_()
        piece.scatter_add_(1, columns[rows], piece.new_full((1, 1), -1.0).expand(piece.shape[0], 1))
        torch.mul(piece, scale[rows], out=out[rows])
    return whole


def cross_entropy_with_grad(
    logits: Tensor,
    labels: Tensor,
    dsum: Tensor,
    *,
    ignore_index: int = -100,
    classes: int = 0,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`cross_entropy`, its lse and `cross_entropy_grad` for the cotangent `dsum` of the sum; `out` may be `logits`."""
    total, lse = cross_entropy(logits, labels, ignore_index=ignore_index, classes=classes)
    grad = cross_entropy_grad(dsum, logits, labels, lse, ignore_index=ignore_index, classes=classes, out=out)
    return total, lse, grad


def linear_cross_entropy_with_grad_(
    total: Tensor,
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    dsum: Tensor,
    *,
    rows: int,
    ignore_index: int = -100,
    classes: int = 0,
    loss: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]] | None = None,
) -> tuple[Tensor, Tensor]:
    """The cross entropy of `logits = x @ weight.T` and its gradients: the sum, dx, and dweight added to `total`.

    total [V, D] in place, x [..., D], weight [V, D], labels i64 [N], dsum f32 [] -> sum f32 [], dx as x. There are
    never logits of more than `rows` rows; their gradient is written over them. `loss` gives (sum, lse, gradient) of the
    logits, labels and dsum of some rows, the gradient over the logits: a kernel, in which `ignore_index` and `classes`
    are constants.
    """
    flat = x.reshape(-1, x.shape[-1])
    dx = torch.empty_like(flat)
    memory = flat.new_empty(min(rows, flat.shape[0]), weight.shape[0])
    if loss is None:
        loss = functools.partial(_loss_over_logits, ignore_index=ignore_index, classes=classes)
    losses = []
    for start in range(0, flat.shape[0], rows):
        part, names = flat[start : start + rows], labels[start : start + rows]
        logits = torch.mm(part, weight.t(), out=memory[: part.shape[0]])
        lost, _, dlogits = loss(logits, names, dsum)
        losses.append(lost)
        torch.mm(dlogits, weight, out=dx[start : start + rows])
        addmm_(total, dlogits.t(), part)
    return torch.stack(losses).sum(), dx.view(x.shape)


def _loss_over_logits(logits: Tensor, labels: Tensor, dsum: Tensor, **options: int) -> tuple[Tensor, ...]:
    return cross_entropy_with_grad(logits, labels, dsum, **options, out=logits)


def row_lse(logits: Tensor) -> Tensor:
    """log sum exp of each row of logits [N, V], f32[N] (f64 of f64), made of some rows at a time."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    lse = torch.empty(logits.shape[0], dtype=dtype, device=logits.device)
    step = chunk_rows(logits)
    for start in range(0, logits.shape[0], step):
        rows = slice(start, start + step)
        torch.logsumexp(wide(logits[rows]), -1, out=lse[rows])
    return lse


def chunk_rows(logits: Tensor) -> int:
    """How many rows of logits are worked on at once."""
    elements = _CHUNK_ELEMENTS_CUDA if logits.is_cuda else _CHUNK_ELEMENTS
    return max(1, elements // max(1, logits.shape[1]))  # a part may be padding alone


def addmm_(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Add left [M, K] @ right [K, N] to total [M, N] in place. On a GPU the product of low-precision matrices enters an
    f32 total as it was summed; elsewhere it is rounded to their dtype before."""
    if total.dtype == left.dtype:
        return total.addmm_(left, right)
    if total.is_cuda and total.dtype == torch.float32:
        _aten.addmm.dtype_out(total, left, right, torch.float32, out=total)
        return total
    return total.add_(left @ right)


def mm_(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Write left [M, K] @ right [K, N] over total [M, N], whatever that holds; over an f32 one as `addmm_` adds."""
    if total.dtype == left.dtype:
        return torch.mm(left, right, out=total)
    if total.is_cuda and total.dtype == torch.float32:
        _aten.mm.dtype_out(left, right, torch.float32, out=total)
        return total
    return total.copy_(left @ right)


def matmul_add(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """total [..., N] + left [..., K] @ right [K, N], in memory of its own. On a GPU a product of low-precision matrices
    reads the total where it writes the sum, which is rounded once."""
    flat, rows = total.reshape(-1, total.shape[-1]), left.reshape(-1, left.shape[-1])
    made = sum_of(flat, rows, right)
    return (torch.addmm(flat, rows, right) if made is None else made).view(total.shape)


def matmul_add_(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """`matmul_add` over its total, as packages call it that were emitted when that was in place."""
    return total.copy_(matmul_add(total, left, right))


def embedding_grad_(total: Tensor, grad: Tensor, indices: Tensor) -> Tensor:
    """Add each row of grad [..., N] to the row of total [V, N] that its index names, in place."""
    return total.index_add_(0, indices.reshape(-1), grad.reshape(-1, grad.shape[-1]).to(total.dtype))


def global_norm(tensors: list[Tensor]) -> Tensor:
    """The 2-norm of all tensors together, in at least f32."""
    dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors, 2, dtype)))
    return norm


def square_sum(tensors: list[Tensor]) -> Tensor:
    """The sum of the squares of all elements of all tensors, in at least f32."""
    return global_norm(tensors).square()


def gradient_scale(norm: Tensor, count: Tensor, *, max_norm: float) -> tuple[Tensor, Tensor]:
    """The factor on gradients of a loss summed over `count` tokens, clipped to `max_norm` (0: not); norm / count."""
    tokens = count.clamp(min=1).to(norm.dtype)
    mean_norm = norm / tokens
    clip = torch.clamp(max_norm / (mean_norm + 1e-6), max=1.0) if max_norm > 0 else torch.ones_like(norm)
    return clip / tokens, mean_norm


def all_finite(scalars: list[Tensor]) -> Tensor:
    """Whether all of some scalars are finite, bool[]."""
    return torch.isfinite(torch.stack([scalar.double() for scalar in scalars])).all()


def loss_scale_update(
    scale: Tensor, clean: Tensor, finite: Tensor, *, growth: float = 2.0, backoff: float = 0.5, interval: int = 2000
) -> tuple[Tensor, Tensor]:
    """The loss scale f32[] and the clean steps i64[] since it changed, after a step that was finite or not.

    As torch.amp.GradScaler has it: a step that is not finite multiplies by `backoff`, `interval` clean ones multiply by
    `growth`.
    """
    counted = clean + 1
    full = counted >= interval
    larger = scale * growth
    grown = torch.where(full & torch.isfinite(larger), larger, scale)
    return torch.where(finite, grown, scale * backoff), counted * (finite & ~full)


def accumulate_each_(totals: list[Tensor], parts: list[Tensor]) -> None:
    """Add each part to its total in place, in the total's dtype."""
    torch._foreach_add_(totals, parts)


def copy_(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into its target, rounding to the target's dtype."""
    torch._foreach_copy_(targets, sources)


def zero_(tensors: list[Tensor]) -> None:
    """Set all tensors to zero."""
    torch._foreach_zero_(tensors)
