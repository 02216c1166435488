"""Scaled dot-product attention (Vaswani et al. 2017, arXiv:1706.03762) with grouped heads, and its gradient.

Operands after q, k and v are optional; the attribute `extra` names them in order:

    start     i64[]                where the first query sits in a longer sequence
    sinks     [H]                  the score of a column that has no value (learned; gets a gradient)
    segments  int [B, S]           a query sees keys of its own segment only; S = T. May be given more than once
    keys      bool or int [B, T]   keys that are seen: where it is not zero
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import sympy

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

ATTRS = {"scale": REQUIRED, "causal": False, "window": None, "softcap": None, "extra": ()}


def _grouped(heads: Tensor, k: Tensor) -> Any:
    """[B, H, ...] as [B, G, H/G, ...] in at least f32, for the G heads of k."""
    return promote(heads).unflatten(1, (k.shape[1], -1))


def _hidden(q: Tensor, k: Tensor, causal: bool, window: int | None, extra: Sequence[tuple[str, Tensor]]) -> Tensor:
    """True where a query does not see a key; broadcasts to [B, G, H/G, S, T]."""
    import torch

    rows = torch.arange(q.shape[2], device=q.device)[:, None] + dict(extra).get("start", 0)
    columns = torch.arange(k.shape[2], device=q.device)
    hidden = columns > rows if causal else torch.zeros_like(columns > rows)
    if window is not None:
        hidden = hidden | (columns <= rows - window)
    for name, value in extra:
        if name == "segments":
            hidden = hidden | (value[:, None, None, :, None] != value[:, None, None, None, :])
        elif name == "keys":
            hidden = hidden | (value[:, None, None, None, :] == 0)
    return hidden


def _capped(q: Tensor, k: Tensor, scale: float, softcap: float | None) -> Any:
    """Scaled scores [B, G, H/G, S, T], bent to stay within ±softcap."""
    import torch

    scores = torch.einsum("bgrsd,bgtd->bgrst", _grouped(q, k), promote(k)) * scale
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def _weights(scores: Tensor, hidden: Tensor, lse: Any) -> Any:
    """`exp(scores - lse)`, 0 where hidden: also in a row that sees nothing, whose lse is -inf."""
    return (scores - lse[..., None]).exp().masked_fill(hidden, 0.0)


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
) -> tuple[Tensor, Tensor]:
    """`out = softmax(cap(scale · q kᵀ) + mask) v`, `lse = log Σ exp` of the masked scores and of the sink.

    q [B, H, S, D], k [B, G, T, D], v [B, G, T, E] → out [B, H, S, E] in q's dtype, lse [B, H, S] in f32. Query head h
    reads head h // (H/G) of k and v. Operands that `extra` names follow: start i64[] (else 0), sinks [H], segments
    int [B, S] (any number of them), keys bool or int [B, T].

    `cap(x) = softcap · tanh(x / softcap)`, where given. Query row i sits at position p = start + i; it sees key j where
    `j <= p` (causal), `j > p - window` (window), every segments has equal numbers at i and j, and keys is not 0 at j.
    The sink of a head is one more score in every row's sum, without a value. A row that sees no key gives 0. Computed
    in at least f32.
    """
    import torch

    named = tuple(zip(extra, more, strict=True))
    hidden = _hidden(q, k, causal, window, named)
    scores = _capped(q, k, scale, softcap).masked_fill(hidden, float("-inf"))
    sinks = dict(named).get("sinks")
    if sinks is not None:
        column = promote(sinks).unflatten(0, (k.shape[1], -1))[..., None, None]
        scores = torch.cat([scores, column.expand_as(scores[..., :1])], -1)
    # Not exp(scores - lse): what rounds in lse would be an error of the whole row, the larger the further it is from 0.
    weights = scores.softmax(-1)[..., : k.shape[2]].masked_fill(hidden, 0.0)
    out = torch.einsum("bgrst,bgte->bgrse", weights, promote(v))
    return rounded(out.flatten(1, 2), q), scores.logsumexp(-1).flatten(1, 2)


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
) -> tuple[Tensor, ...]:
    """Gradient of `attention` from its results (Dao et al. 2022, arXiv:2205.14135, appendix B): with the capped scores
    s, the weights P = exp(s - lse) and the row sums Δ = Σ dout · out,

        dv = Pᵀ dout,  ds = P · (dout vᵀ - Δ) · (1 - (s/softcap)²) · scale,  dq = ds k,  dk = dsᵀ q

    where dk and dv are summed over the query heads of a group; with sinks also dsinks = -Σ exp(sinks - lse) · Δ over
    batch and rows. Shapes and dtypes are those of q, k, v and sinks.
    """
    import torch

    named = tuple(zip(extra, more, strict=True))
    grad, row_lse = _grouped(dout, k), _grouped(lse, k)
    scores = _capped(q, k, scale, softcap)
    weights = _weights(scores, _hidden(q, k, causal, window, named), row_lse)
    delta = (grad * _grouped(out, k)).sum(-1, keepdim=True)
    dv = torch.einsum("bgrst,bgrse->bgte", weights, grad)
    dscores = weights * (torch.einsum("bgrse,bgte->bgrst", grad, promote(v)) - delta) * scale
    if softcap is not None:
        dscores = dscores * (1 - (scores / softcap) ** 2)
    dq = torch.einsum("bgrst,bgtd->bgrsd", dscores, promote(k)).flatten(1, 2)
    dk = torch.einsum("bgrst,bgrsd->bgtd", dscores, _grouped(q, k))
    grads = rounded(dq, q), rounded(dk, k), rounded(dv, v)
    sinks = dict(named).get("sinks")
    if sinks is None:
        return grads
    share = (promote(sinks)[None, :, None] - promote(lse)).exp()
    dsinks = -(share * delta.flatten(1, 2).squeeze(-1)).sum((0, 2))
    return (*grads, rounded(dsinks, sinks))


def _infer(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    q, k, v = types[:3]
    if not all(len(t.shape) == 4 for t in (q, k, v)):
        raise ValueError(f"attention: q, k and v must have 4 dims, not {q}, {k}, {v}")
    batch, heads, rows, width = q.shape
    if k.shape[0] != batch or k.shape[3] != width or k.shape[:3] != v.shape[:3]:
        raise ValueError(f"attention: q {q}, k {k} and v {v} do not fit")
    if divide(heads, k.shape[1]) is None:
        raise ValueError(f"attention: {heads} query heads do not divide into {k.shape[1]} groups")
    extra, keys = attrs["extra"], k.shape[2]
    if len(extra) != len(types) - 3:
        raise ValueError(f"attention: {len(types) - 3} operands after v, but extra names {len(extra)}")
    wanted: dict[str, tuple[Dim, ...]] = {"start": (), "sinks": (heads,), "segments": (batch, rows)}
    wanted["keys"] = (batch, keys)
    for name, type_ in zip(extra, types[3:], strict=True):
        if name not in wanted or type_.shape != wanted[name]:
            raise ValueError(f"attention: {name} {type_} does not fit q {q} and k {k}")
        if type_.dtype.is_float != (name == "sinks"):
            raise ValueError(f"attention: {name} has the dtype of {type_}")
    if "segments" in extra and (rows != keys or "start" in extra):
        raise ValueError(f"attention: segments are of queries that are also the keys, not of q {q} and k {k}")
    return TensorType(q.dtype, (batch, heads, rows, v.shape[3])), TensorType(DType.F32, (batch, heads, rows))


def _infer_grad(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    sinks = tuple(t for name, t in zip(attrs["extra"], types[6:], strict=True) if name == "sinks")
    return (*types[1:4], *sinks)


def _gradient(request: GradientRequest) -> Sequence[Value | None]:
    node = request.node
    assert request.cotangents[1] is None, "attention: lse is saved for the gradient only and gets no cotangent"
    q, k, v, *more = node.operands
    operands = (request.cotangent, q, k, v, *node.results, *more)
    extra = node.attrs.get("extra", ())
    assert isinstance(extra, tuple)
    names = ["dq", "dk", "dv"] + ["dsinks"] * ("sinks" in extra)
    grads = request.builder.emit("attention_grad", operands, node.attrs, names=names)
    return (*grads[:3], *(grads[3] if name == "sinks" else None for name in extra))


def _products(node: Node, q: int, matmuls: int) -> Dim:
    """`matmuls` products over all pairs of query and key that position hides from neither (half where causal)."""
    queries, keys, values = (v.tensor.shape for v in node.operands[q : q + 3])
    twice: Any = sympy.sympify(keys[2]) * (1 if node.attrs.get("causal") else 2)
    window = node.attrs.get("window")
    twice = sympy.Min(twice, 2 * window) if isinstance(window, int) else twice
    pairs = queries[0] * queries[1] * queries[2] * twice
    return as_dim(sympy.floor(matmuls * pairs * (queries[3] + values[3]) / sympy.Integer(2)))


# Of q, k and v (before them, in the gradient, dout; after them out and lse): what `extra` names follows the strategy.
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
        Strategy("batch", (_BATCH,) * 3, (_BATCH,) * 2),
        Strategy("heads", (_HEADS,) * 3, (_HEADS,) * 2),
    ),
)
define_op(
    "attention_grad",
    attention_grad,
    infer=_infer_grad,
    attrs=ATTRS,
    flops=lambda node: _products(node, 1, 5),
    bytes=traffic,
    compute_dtype="f32",
    strategies=(
        Strategy("batch", (_BATCH,) * 6, (_BATCH,) * 3),
        Strategy("heads", (_HEADS,) * 6, (_HEADS,) * 3),
    ),
)
