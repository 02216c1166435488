"""Scaled dot-product attention (Vaswani et al. 2017, arXiv:1706.03762) with grouped heads, and its gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mgraph.ir.dims import Dim, as_dim, divide
from mgraph.ir.graph import Node
from mgraph.ir.opdef import REQUIRED, GradientRequest, Strategy, define_op
from mgraph.ir.ops.cost import traffic
from mgraph.ir.ops.numeric import rounded
from mgraph.ir.torch_bridge import promote
from mgraph.ir.types import DType, Shard, TensorType

if TYPE_CHECKING:
    from torch import Tensor

    from mgraph.ir.graph import Value

ATTRS = {"scale": REQUIRED, "causal": False, "window": None}


def _grouped(heads: Tensor, k: Tensor) -> Any:
    """[B, H, ...] as [B, G, H/G, ...] in at least f32, for the G heads of k."""
    return promote(heads).unflatten(1, (k.shape[1], -1))


def _scores(q: Tensor, k: Tensor, start: Tensor | None, scale: float, causal: bool, window: int | None) -> Tensor:
    """Scaled and masked scores [B, G, H/G, S, T]; masked ones are -inf."""
    import torch

    scores = torch.einsum("bgrsd,bgtd->bgrst", _grouped(q, k), promote(k)) * scale
    rows = torch.arange(q.shape[2], device=q.device)[:, None] + (0 if start is None else start)
    columns = torch.arange(k.shape[2], device=q.device)
    hidden = columns > rows if causal else torch.zeros_like(columns > rows)
    if window is not None:
        hidden = hidden | (columns <= rows - window)
    masked: Tensor = scores.masked_fill(hidden, float("-inf"))
    return masked


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
    """`out = softmax(scale · q kᵀ + mask) v`, `lse = log Σ exp` of the masked scores.

    q [B, H, S, D], k [B, G, T, D], v [B, G, T, E], start i64[] (0 where left out) → out [B, H, S, E] in q's dtype, lse
    [B, H, S] in f32. Query head h reads head h // (H/G) of k and v. Query row i sits at position p = start + i; it sees
    key j where `j <= p` (causal) and `j > p - window` (window). Every row must see a key. Computed in at least f32.
    """
    import torch

    scores = _scores(q, k, start, scale, causal, window)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp()
    out = torch.einsum("bgrst,bgte->bgrse", weights, promote(v))
    return rounded(out.flatten(1, 2), q), lse.flatten(1, 2)


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
    """Gradient of `attention` from its results (Dao et al. 2022, arXiv:2205.14135, appendix B): with the weights
    P = exp(scores - lse) and the row sums Δ = Σ dout · out,

        dv = Pᵀ dout,  ds = P · (dout vᵀ - Δ) · scale,  dq = ds k,  dk = dsᵀ q

    where dk and dv are summed over the query heads of a group. Shapes and dtypes are those of q, k and v.
    """
    import torch

    grad = _grouped(dout, k)
    weights = (_scores(q, k, start, scale, causal, window) - _grouped(lse, k)[..., None]).exp()
    delta = (grad * _grouped(out, k)).sum(-1, keepdim=True)
    dv = torch.einsum("bgrst,bgrse->bgte", weights, grad)
    dscores = weights * (torch.einsum("bgrse,bgte->bgrst", grad, promote(v)) - delta) * scale
    dq = torch.einsum("bgrst,bgtd->bgrsd", dscores, promote(k)).flatten(1, 2)
    dk = torch.einsum("bgrst,bgrsd->bgtd", dscores, _grouped(q, k))
    return rounded(dq, q), rounded(dk, k), rounded(dv, v)


def _infer(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    q, k, v = types[:3]
    if not all(len(t.shape) == 4 for t in (q, k, v)):
        raise ValueError(f"attention: q, k and v must have 4 dims, not {q}, {k}, {v}")
    batch, heads, rows, width = q.shape
    if k.shape[0] != batch or k.shape[3] != width or k.shape[:3] != v.shape[:3]:
        raise ValueError(f"attention: q {q}, k {k} and v {v} do not fit")
    if divide(heads, k.shape[1]) is None:
        raise ValueError(f"attention: {heads} query heads do not divide into {k.shape[1]} groups")
    return TensorType(q.dtype, (batch, heads, rows, v.shape[3])), TensorType(DType.F32, (batch, heads, rows))


def _gradient(request: GradientRequest) -> Sequence[Value | None]:
    node = request.node
    assert request.cotangents[1] is None, "attention: lse is saved for the gradient only and gets no cotangent"
    q, k, v, *start = node.operands
    operands = (request.cotangent, q, k, v, *node.results, *start)
    grads = request.builder.emit("attention_grad", operands, node.attrs, names=("dq", "dk", "dv"))
    return (*grads, *(None for _ in start))


def _products(node: Node, q: int, matmuls: int) -> Dim:
    """`matmuls` products over all pairs of query and key, half of them where causal."""
    queries, keys, values = (v.tensor.shape for v in node.operands[q : q + 3])
    pairs = queries[0] * queries[1] * queries[2] * keys[2]
    work = as_dim(matmuls * pairs * (queries[3] + values[3]))
    return as_dim(work / 2) if node.attrs.get("causal") else work


_HEADS, _BATCH = Shard(1), Shard(0)

define_op(
    "attention",
    attention,
    infer=_infer,
    attrs=ATTRS,
    gradient=_gradient,
    flops=lambda node: _products(node, 0, 2),
    bytes=traffic,
    compute_dtype="f32",
    strategies=(
        Strategy("batch", (_BATCH, _BATCH, _BATCH, None), (_BATCH, _BATCH)),
        Strategy("heads", (_HEADS, _HEADS, _HEADS, None), (_HEADS, _HEADS)),
    ),
)
define_op(
    "attention_grad",
    attention_grad,
    infer=lambda types, attrs: (types[1], types[2], types[3]),
    attrs=ATTRS,
    flops=lambda node: _products(node, 1, 5),
    bytes=traffic,
    compute_dtype="f32",
    strategies=(
        Strategy("batch", (_BATCH,) * 6 + (None,), (_BATCH,) * 3),
        Strategy("heads", (_HEADS,) * 6 + (None,), (_HEADS,) * 3),
    ),
)
