"""Mixture of experts: dispatch to experts, grouped matrix products, weighted combination (no token is dropped).

Shapes: T tokens, E experts, K experts a token, N width, R rows (T·K where every token is dispatched). A row is one
(token, choice) pair, and `order` maps rows, sorted by expert, to pairs: row r stands for pair `order[r] = t·K + k`.

A pair may be of no expert here: its index is E (`others`). Its row is behind those of all experts, from `offsets[E-1]`
on, and may hold anything: an op that is handed `offsets` beside `order` reads no such row, as if it were 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mgraph.ir.dims import Dim, as_dim, divide
from mgraph.ir.graph import Node
from mgraph.ir.opdef import REQUIRED, GradientRequest, define_op
from mgraph.ir.ops.cost import per_element, traffic
from mgraph.ir.ops.numeric import rounded
from mgraph.ir.torch_bridge import promote, to_torch_dtype
from mgraph.ir.types import DType, TensorType

if TYPE_CHECKING:
    from torch import Tensor

    from mgraph.ir.graph import Value

    Attrs = Mapping[str, Any]
    Types = Sequence[TensorType]


def moe_order(indices: Tensor, *, num_experts: int, others: bool = False) -> tuple[Tensor, Tensor]:
    """Pairs of token and choice by expert, then by token: `moe_dispatch` without its rows.

    indices i64[T, K] → order i64[T·K], offsets i32[E]. With `others` an index may be E. What is no number of an expert
    counts as E.
    """
    import torch

    chosen = indices.flatten()
    by_expert, order = chosen.where((chosen >= 0) & (chosen < num_experts), num_experts).sort(stable=True)
    experts = torch.arange(num_experts, device=indices.device)
    return order, torch.searchsorted(by_expert, experts, right=True, out_int32=True)


def moe_dispatch(
    x: Tensor, indices: Tensor, *, num_experts: int, others: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Copy each token once for each of its experts, sorted by expert (stably: then by token).

    x [T, N], indices i64[T, K] → rows [T·K, N], order i64[T·K], offsets i32[E]. `rows[r] = x[order[r] // K]`; the rows
    of expert e end at `offsets[e]` and begin where those of e - 1 end, so an expert without tokens has an empty range.
    With `others` an index may be E.
    """
    order, offsets = moe_order(indices, num_experts=num_experts)
    return x[order // indices.shape[1]], order, offsets


def moe_dispatch_grad(drows: Tensor, order: Tensor, *extra: Tensor, top_k: int, others: bool = False) -> Tensor:
    """Gradient of `moe_dispatch`: dx [T, N] sums the K rows of a token of drows [T·K, N], in at least f32.

    `extra` is offsets i32[E] with `others`, then perhaps more [T·K, N]: the rows are those of drows + more.
    """
    more = extra[others:]
    rows = promote(drows) + promote(more[0]) if more else promote(drows)
    if others:
        rows = of_experts(rows, extra[0])
    pairs = rows[order.argsort()].unflatten(0, (-1, top_k))
    return rounded(pairs.sum(1), drows)


def _infer_dispatch(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, indices = types
    if len(x.shape) != 2 or len(indices.shape) != 2 or x.shape[0] != indices.shape[0]:
        raise ValueError(f"moe_dispatch: x {x} and indices {indices} do not fit")
    rows = indices.numel
    return (
        TensorType(x.dtype, (rows, x.shape[1])),
        TensorType(DType.I64, (rows,)),
        TensorType(DType.I32, (attrs["num_experts"],)),
    )


def _dispatch_gradient(request: GradientRequest) -> Sequence[Value | None]:
    node = request.node
    attrs: dict[str, object] = {"top_k": node.operands[1].tensor.shape[1]}
    operands = [request.cotangent, node.results[1]]
    if node.attrs.get("others"):
        operands, attrs = [*operands, node.results[2]], {**attrs, "others": True}
    return (*request.builder.emit("moe_dispatch_grad", operands, attrs, names=("dx",)), None)


def _infer_dispatch_grad(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    rows, width = types[0].shape
    tokens = divide(rows, attrs["top_k"])
    more = types[2 + bool(attrs.get("others")) :]
    if more and more[0] != types[0]:
        raise ValueError(f"moe_dispatch_grad: drows {types[0]} and more {more[0]} do not fit")
    if tokens is None:
        raise ValueError(f"moe_dispatch_grad: {rows} rows are not {attrs['top_k']} a token")
    return (TensorType(types[0].dtype, (tokens, width)),)


def of_experts(rows: Tensor, offsets: Tensor) -> Tensor:
    """rows [R, N] or [R] with 0 for those of no expert, from offsets[-1] on (i32[E], cumulative ends)."""
    import torch

    real = torch.arange(rows.shape[0], device=rows.device) < offsets[-1]
    return rows.where(real.unflatten(0, (-1, *[1] * (rows.dim() - 1))), rows.new_zeros(()))


def _ranges(offsets: Tensor) -> list[tuple[int, int, int]]:
    """(expert, first row, end row) of every expert that has rows."""
    ends: list[int] = offsets.tolist()
    return [(e, a, b) for e, (a, b) in enumerate(zip([0, *ends], ends, strict=False)) if a < b]


def grouped_matmul(
    rows: Tensor, w: Tensor, offsets: Tensor, bias: Tensor | None = None, *, transpose_w: bool = False
) -> Tensor:
    """`y[r] = rows[r] @ w[e] + bias[e]` for every row r of expert e, summed in at least f32.

    rows [R, N], w [E, N, F] ([E, F, N] if `transpose_w`), offsets i32[E], optional bias [E, F] → y [R, F]. Rows past
    offsets[E-1] give 0.
    """
    out = rows.new_zeros(rows.shape[0], w.shape[1 if transpose_w else 2])
    for expert, start, stop in _ranges(offsets):
        matrix = promote(w[expert])
        product = promote(rows[start:stop]) @ (matrix.t() if transpose_w else matrix)
        out[start:stop] = rounded(product if bias is None else product + promote(bias[expert]), rows)
    return out


def grouped_sum(rows: Tensor, offsets: Tensor) -> Tensor:
    """`y[e] = Σ over rows r of expert e of rows[r]`: the gradient of a grouped bias.

    rows [R, F], offsets i32[E] → y [E, F], 0 for an expert without rows. Summed in at least f32.
    """
    out = rows.new_zeros(offsets.shape[0], rows.shape[1])
    for expert, start, stop in _ranges(offsets):
        out[expert] = rounded(promote(rows[start:stop]).sum(0), rows)
    return out


def grouped_outer(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """`y[e] = Σ over rows r of expert e of left[r]ᵀ right[r]`: the gradient of grouped weights.

    left [R, N], right [R, F], offsets i32[E] → y [E, N, F], 0 for an expert without rows. Summed in at least f32.
    """
    out = left.new_zeros(offsets.shape[0], left.shape[1], right.shape[1])
    for expert, start, stop in _ranges(offsets):
        out[expert] = rounded(promote(left[start:stop]).t() @ promote(right[start:stop]), left)
    return out


def _infer_grouped(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    rows, w, offsets, *bias = types
    inner, outer = w.shape[1:][::-1] if attrs.get("transpose_w") else w.shape[1:]
    if len(rows.shape) != 2 or rows.shape[1] != inner or offsets.shape != w.shape[:1]:
        raise ValueError(f"grouped_matmul: rows {rows}, w {w} and offsets {offsets} do not fit")
    if bias and bias[0].shape != (w.shape[0], outer):
        raise ValueError(f"grouped_matmul: w {w} and bias {bias[0]} do not fit")
    return (TensorType(rows.dtype, (rows.shape[0], outer)),)


def _grouped_gradient(request: GradientRequest) -> Sequence[Value | None]:
    builder, grad = request.builder, request.cotangent
    rows, w, offsets, *bias = request.node.operands
    transposed = bool(request.node.attrs.get("transpose_w", False))
    drows = dw = None
    if request.needs[0]:
        drows = builder.one("grouped_matmul", grad, w, offsets, name="drows", transpose_w=not transposed)
    if request.needs[1]:
        pair = (grad, rows) if transposed else (rows, grad)
        dw = builder.one("grouped_outer", *pair, offsets, name="dw")
    if not bias:
        return drows, dw, None
    return drows, dw, None, builder.one("grouped_sum", grad, offsets, name="dbias") if request.needs[3] else None


def moe_combine(rows: Tensor, weights: Tensor, order: Tensor, offsets: Tensor | None = None, *, dtype: DType) -> Tensor:
    """`y[t] = Σ over k of weights[t, k] · rows[r]`, r the row that stands for pair t·K + k.

    rows [T·K, N], weights [T, K], order i64[T·K], optional offsets i32[E] → y [T, N] in rows' dtype. The products are
    rounded to `dtype` (that of the written-out product) and their sum once more to rows' dtype.
    """
    rows = rows if offsets is None else of_experts(rows, offsets)
    pairs = promote(rows[order.argsort()]).unflatten(0, tuple(weights.shape))
    products = (pairs * promote(weights)[..., None]).to(to_torch_dtype(dtype))
    return rounded(promote(products).sum(1), rows)


def moe_combine_grad(
    dy: Tensor, rows: Tensor, weights: Tensor, order: Tensor, offsets: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gradient of `moe_combine`: for pair p = t·K + k of row r, `drows[r] = dy[t] · weights[t, k]` and
    `dweights[t, k] = Σ dy[t] · rows[r]`. drows [T·K, N] in rows' dtype, dweights [T, K] in weights'.
    """
    tokens, top_k = weights.shape
    grad = promote(dy)[order // top_k]
    if offsets is not None:
        grad, rows = of_experts(grad, offsets), of_experts(rows, offsets)
    drows = grad * promote(weights).flatten()[order][:, None]
    dots = (grad * promote(rows)).sum(-1)[order.argsort()]
    return rounded(drows, rows), rounded(dots.reshape(tokens, top_k), weights)


def _infer_combine(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    rows, weights, order = types[:3]
    if len(rows.shape) != 2 or weights.numel != rows.shape[0] or order.shape != rows.shape[:1]:
        raise ValueError(f"moe_combine: rows {rows}, weights {weights} and order {order} do not fit")
    return (TensorType(rows.dtype, (weights.shape[0], rows.shape[1])),)


def _combine_gradient(request: GradientRequest) -> Sequence[Value | None]:
    operands = (request.cotangent, *request.node.operands)
    made = request.builder.emit("moe_combine_grad", operands, names=("drows", "dweights"))
    return *made, *(None for _ in request.node.operands[2:])


def _product(node: Node) -> Dim:
    """Each row meets one matrix, whatever the split over experts."""
    rows, other = node.operands[0].tensor, node.operands[1].tensor
    inner = other.shape[1] * (1 if node.op == "grouped_outer" else other.shape[2])
    width = rows.shape[1] if node.op == "grouped_outer" else 1
    return as_dim(2 * rows.shape[0] * width * inner)


define_op(
    "moe_dispatch",
    moe_dispatch,
    infer=_infer_dispatch,
    attrs={"num_experts": REQUIRED, "others": False},
    gradient=_dispatch_gradient,
    bytes=traffic,
)
define_op(
    "moe_dispatch_grad",
    moe_dispatch_grad,
    infer=_infer_dispatch_grad,
    attrs={"top_k": REQUIRED, "others": False},
    flops=per_element(1),
    bytes=traffic,
    compute_dtype="f32",
)
define_op(
    "grouped_matmul",
    grouped_matmul,
    infer=_infer_grouped,
    attrs={"transpose_w": False},
    gradient=_grouped_gradient,
    flops=_product,
    bytes=traffic,
    compute_dtype="f32",
)
define_op(
    "grouped_outer",
    grouped_outer,
    signature="r^ n, r^ f, e^ -> e n f",
    flops=_product,
    bytes=traffic,
    compute_dtype="f32",
)
define_op(
    "grouped_sum",
    grouped_sum,
    signature="r^ f, e^ -> e f",
    flops=per_element(1),
    bytes=traffic,
    compute_dtype="f32",
)
define_op(
    "moe_combine",
    moe_combine,
    infer=_infer_combine,
    attrs={"dtype": REQUIRED},
    gradient=_combine_gradient,
    flops=per_element(2),
    bytes=traffic,
    compute_dtype="f32",
)
define_op(
    "moe_combine_grad",
    moe_combine_grad,
    infer=lambda types, attrs: (types[1], types[2]),
    flops=per_element(4),
    bytes=traffic,
    compute_dtype="f32",
)
