"""Experts in few ops: rows are taken where tokens lie, and units are activated where they are made.

Shapes and names as in `moe`: T tokens, E experts, K experts a token, N width, F width of a unit, R rows; row r stands
for pair `order[r] = t·K + k`, and the rows of expert e end at `offsets[e]`. Rows past the last offset are of no expert
(`others` of `moe`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mgraph.ir.dims import Dim, as_dim, divide
from mgraph.ir.graph import Node
from mgraph.ir.opdef import REQUIRED, define_op, op_def
from mgraph.ir.ops.cost import per_element, traffic
from mgraph.ir.ops.glu import GLU_ATTRS, glu, glu_grad
from mgraph.ir.ops.moe import grouped_matmul, grouped_outer, moe_combine, moe_order
from mgraph.ir.ops.numeric import rounded
from mgraph.ir.ops.route import CHOOSING, WEIGHING, moe_route
from mgraph.ir.torch_bridge import promote
from mgraph.ir.types import DType, TensorType

if TYPE_CHECKING:
    from torch import Tensor

    Attrs = Mapping[str, Any]
    Types = Sequence[TensorType]


def real_choice(indices: Tensor, starts: Tensor, *, num_experts: int) -> Tensor:
    """The choice of tokens that are of a request: those from `starts[-1]` on, which only fill a step up, choose E.

    indices i64[T, K], starts i32[R+1] (where the tokens of each request begin, and where all end) → i64[T, K].
    """
    import torch

    padding = torch.arange(indices.shape[0], device=indices.device) >= starts[-1]
    return indices.masked_fill(padding[:, None], num_experts)


def moe_route_order(
    logits: Tensor, *more: Tensor, ended: bool = False, **attrs: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`moe_route` and `moe_order` of what it chooses, with the attributes of the former.

    logits [T, E], optional bias [E], starts i32[R+1] if `ended` → weights [T, K], indices i64[T, K], order i64[T·K],
    offsets i32[E]. With `ended` the order is that of the `real_choice`.
    """
    weights, indices = moe_route(logits, *more[: len(more) - ended], **attrs)
    experts = logits.shape[1]
    chosen = real_choice(indices, more[-1], num_experts=experts) if ended else indices
    return weights, indices, *moe_order(chosen, num_experts=experts, others=ended)


def expert_glu(
    x: Tensor,
    order: Tensor,
    offsets: Tensor,
    *given: Tensor,
    top_k: int,
    act: str,
    alpha: float = 1.702,
    limit: float = 0.0,
    offset: float = 0.0,
    transpose_w: bool = False,
    packed: str = "",
    keep: bool = False,
) -> Any:
    """`y[r] = glu(x[t] @ gate_weight[e], x[t] @ up_weight[e])` for the token t and the expert e of each row r.

    x [T, N], order i64[R], offsets i32[E], both weights [E, N, F] ([E, F, N] if `transpose_w`), perhaps both biases
    [E, F] → y [R, F]; and, if they are to `keep`, gate and up [R, F], which are rounded before they are activated.
    Where the weights are `packed` they are one tensor of width 2F, and so are the biases: `halves` has gates, then ups,
    `pairs` has them by turns. `top_k` is K; else as `glu`.
    """
    rows = x[order // top_k]
    count = 1 if packed else 2
    products = [
        grouped_matmul(rows, w, offsets, *bias, transpose_w=transpose_w)
        for w, *bias in (given[i::count] for i in range(count))
    ]
    gate, up = unpacked(products[0], packed) if packed else products
    y = glu(gate, up, act=act, alpha=alpha, limit=limit, offset=offset)
    return (y, gate, up) if keep else y


def unpacked(both: Tensor, packed: str) -> tuple[Tensor, Tensor]:
    """Gates and ups [R, F] of what has both [R, 2F]."""
    if packed == "pairs":
        return both[:, ::2], both[:, 1::2]
    gate, up = both.chunk(2, -1)
    return gate, up


def expert_sum(
    rows: Tensor,
    weight: Tensor,
    weights: Tensor,
    order: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: DType,
    transpose_w: bool = False,
    ended: bool = False,
) -> Tensor:
    """`y[t] = Σ over k of weights[t, k] · (rows[r] @ weight[e] + bias[e])`, r the row of pair t·K + k, e its expert.

    rows [R, F], weight [E, F, N] ([E, N, F] if `transpose_w`), weights [T, K], order i64[R], offsets i32[E], optional
    bias [E, N] → y [T, N] in rows' dtype, which the products are rounded to before they are weighed; else as
    `moe_combine`. With `ended` rows past the last offset are of no expert, and of the last tokens, whose sum is 0.
    """
    out = grouped_matmul(rows, weight, offsets, bias, transpose_w=transpose_w)
    return moe_combine(out, weights, order, offsets if ended else None, dtype=dtype)


def expert_glu_grad(
    dy: Tensor,
    weights: Tensor,
    order: Tensor,
    offsets: Tensor,
    weight: Tensor,
    gate: Tensor,
    up: Tensor,
    *,
    top_k: int,
    act: str,
    alpha: float = 1.702,
    limit: float = 0.0,
    offset: float = 0.0,
    transpose_w: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of units and of weights, through the product after and the weighted sum of a token's rows.

    dy [T, N] is the cotangent of `Σ over k of weights[t, k] · (y[r] @ weight[e])`, weights [T, K], weight [E, F, N]
    ([E, N, F] if `transpose_w`), `y = glu(gate, up)`, gate and up [R, F]. With `g[r] = dy[t] @ weight[e]ᵀ`, never
    rounded: dgate and dup [R, F] are those of `glu` for `weights[t, k] · g[r]`; weighted [R, F] is `weights[t, k] ·
    y[r]`, of which and of dy the gradient of the weight is made; dweights [T, K] is `g[r] · y[r]`.
    """
    products = grouped_matmul(promote(dy)[order // top_k], weight, offsets, transpose_w=not transpose_w)
    share = promote(weights).flatten()[order][:, None]
    unit: dict[str, Any] = {"act": act, "alpha": alpha, "limit": limit, "offset": offset}
    wide = [promote(gate), promote(up)]
    dgate, dup = glu_grad(products * share, wide[0], wide[1], **unit)
    y = promote(glu(gate, up, **unit))
    dweights = weights.new_zeros(weights.shape)
    dweights.view(-1)[order] = rounded((products * y).sum(-1), weights)
    return rounded(dgate, gate), rounded(dup, up), rounded(y * share, gate), dweights


def grouped_matmul_sum(
    first: Tensor,
    first_weight: Tensor,
    second: Tensor,
    second_weight: Tensor,
    offsets: Tensor,
    *,
    transpose_w: bool = False,
) -> Tensor:
    """`y[r] = first[r] @ first_weight[e] + second[r] @ second_weight[e]`, summed in at least f32 and rounded once.

    first, second [R, N], both weights [E, N, F] ([E, F, N] if `transpose_w`), offsets i32[E] → y [R, F].
    """
    parts = [
        grouped_matmul(promote(rows), promote(w), offsets, transpose_w=transpose_w)
        for rows, w in ((first, first_weight), (second, second_weight))
    ]
    return rounded(parts[0] + parts[1], first)


def gathered_outer(left: Tensor, right: Tensor, order: Tensor, offsets: Tensor, *, top_k: int, side: str) -> Tensor:
    """`grouped_outer`, one `side` of which (`left` or `right`) is given by token and taken for each row.

    left [R, N] or [T, N], right [R, F] or [T, F], order i64[R], offsets i32[E] → y [E, N, F].
    """
    source = order // top_k
    sides = (left[source], right) if side == "left" else (left, right[source])
    return grouped_outer(*sides, offsets)


def _infer_order(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    return TensorType(DType.I64, (types[0].numel,)), TensorType(DType.I32, (attrs["num_experts"],))


def _infer_route_order(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    infer = op_def("moe_route").infer
    assert infer is not None
    weights, indices = infer(types[: len(types) - attrs["ended"]], attrs)
    assert isinstance(weights, TensorType) and isinstance(indices, TensorType)
    return weights, indices, *_infer_order((indices,), {"num_experts": types[0].shape[1]})


def _infer_first(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    return (types[0],)


def _matrix(w: TensorType, transposed: Any) -> tuple[Dim, Dim]:
    """What a matrix takes and gives."""
    inner, outer = w.shape[1:][::-1] if transposed else w.shape[1:]
    return inner, outer


def _infer_glu(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, order, offsets, *given = types
    packed, count = attrs["packed"], 1 if attrs["packed"] else 2
    if packed not in ("", "halves", "pairs"):
        raise ValueError(f"expert_glu: packed is {packed!r}, not halves or pairs")
    weights, biases = given[:count], given[count:]
    inner, outer = _matrix(weights[0], attrs["transpose_w"])
    fits = len({w.shape for w in weights}) == 1 and x.shape[1] == inner and offsets.shape == weights[0].shape[:1]
    if not fits or len(biases) not in (0, count) or any(b.shape != (*offsets.shape, outer) for b in biases):
        raise ValueError(f"expert_glu: x {x}, offsets {offsets}, weights and biases {given} do not fit")
    width = divide(outer, 2) if packed else outer
    if width is None:
        raise ValueError(f"expert_glu: a packed width is {outer}, not a multiple of 2")
    return (TensorType(x.dtype, (order.shape[0], width)),) * (3 if attrs["keep"] else 1)


def _infer_expert_sum(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    rows, weight, weights, order, offsets, *bias = types
    inner, outer = _matrix(weight, attrs["transpose_w"])
    fits = rows.shape == (order.shape[0], inner) and weights.numel == order.shape[0]
    if not fits or offsets.shape != weight.shape[:1] or any(b.shape != (*offsets.shape, outer) for b in bias):
        raise ValueError(f"expert_sum: rows {rows}, weight {weight}, weights {weights} and order {order} do not fit")
    return (TensorType(rows.dtype, (weights.shape[0], outer)),)


def _infer_glu_grad(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    dy, weights, order, offsets, weight, gate, up = types
    inner, outer = _matrix(weight, attrs["transpose_w"])
    fits = gate.shape == up.shape == (order.shape[0], inner) and dy.shape[1] == outer
    if not fits or weights.numel != order.shape[0] or offsets.shape != weight.shape[:1]:
        raise ValueError(f"expert_glu_grad: dy {dy}, weights {weights}, weight {weight} and gate {gate} do not fit")
    return gate, up, gate, weights


def _infer_sum(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    first, first_weight, second, second_weight, offsets = types
    inner, outer = _matrix(first_weight, attrs["transpose_w"])
    if first != second or first_weight.shape != second_weight.shape or first.shape[1] != inner:
        raise ValueError(f"grouped_matmul_sum: {first} and {second} do not fit {first_weight} and {second_weight}")
    if offsets.shape != first_weight.shape[:1]:
        raise ValueError(f"grouped_matmul_sum: offsets {offsets} do not fit {first_weight}")
    return (TensorType(first.dtype, (first.shape[0], outer)),)


def _infer_outer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    left, right, order, offsets = types
    if attrs["side"] not in ("left", "right"):
        raise ValueError(f"gathered_outer: side is {attrs['side']!r}, not left or right")
    given = right if attrs["side"] == "left" else left
    if given.shape[0] != order.shape[0]:
        raise ValueError(f"gathered_outer: {given} has not one row for each of order {order}")
    return (TensorType(left.dtype, (*offsets.shape, left.shape[1], right.shape[1])),)


def _products(rows: int, weight: int, times: int) -> Any:
    """A cost: each row of an operand meets one matrix, so many times."""

    def flops(node: Node) -> Dim:
        w = node.operands[weight].tensor
        return as_dim(2 * times * node.operands[rows].tensor.shape[0] * w.shape[1] * w.shape[2])

    return flops


def _unit_products(node: Node) -> Dim:
    return _products(1, 3, 1 if node.attrs.get("packed") else 2)(node)


def _outer_product(node: Node) -> Dim:
    left, right, order, _ = (value.tensor for value in node.operands)
    return as_dim(2 * order.shape[0] * left.shape[1] * right.shape[1])


_COMMON: Mapping[str, Any] = {"bytes": traffic, "compute_dtype": "f32"}
_UNIT: Mapping[str, Any] = {"top_k": REQUIRED, **GLU_ATTRS, "transpose_w": False}

define_op("moe_order", moe_order, infer=_infer_order, attrs={"num_experts": REQUIRED, "others": False}, bytes=traffic)
define_op("real_choice", real_choice, infer=_infer_first, attrs={"num_experts": REQUIRED}, bytes=traffic)
define_op(
    "moe_route_order",
    moe_route_order,
    infer=_infer_route_order,
    attrs={"top_k": REQUIRED, **WEIGHING, **CHOOSING, "dtype": DType.F32, "ended": False},
    flops=per_element(5),
    **_COMMON,
)
define_op(
    "expert_glu",
    expert_glu,
    infer=_infer_glu,
    attrs={**_UNIT, "packed": "", "keep": False},
    flops=_unit_products,
    **_COMMON,
)
define_op(
    "expert_sum",
    expert_sum,
    infer=_infer_expert_sum,
    attrs={"dtype": REQUIRED, "transpose_w": False, "ended": False},
    flops=_products(0, 1, 1),
    **_COMMON,
)
define_op("expert_glu_grad", expert_glu_grad, infer=_infer_glu_grad, attrs=_UNIT, flops=_products(5, 4, 1), **_COMMON)
define_op(
    "grouped_matmul_sum",
    grouped_matmul_sum,
    infer=_infer_sum,
    attrs={"transpose_w": False},
    flops=_products(0, 1, 2),
    **_COMMON,
)
define_op(
    "gathered_outer",
    gathered_outer,
    infer=_infer_outer,
    attrs={"top_k": REQUIRED, "side": REQUIRED},
    flops=_outer_product,
    **_COMMON,
)
