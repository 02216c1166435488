"""Experts that all have exactly as many rows as their capacity: tokens in their places, zeros in all others.

Shapes: T tokens, K experts a token, E experts with room for C rows each, N width; `moe_capacity` has dropped what finds
no room. Row e·C + i is that of the i-th token that expert e keeps, in the order of the tokens. So extents depend on no
choice, and ranks that share experts send each other equally many rows:

    %rows, %places = padded_dispatch(%x, %indices)        %ends = even_ends(%rows)
    %y = grouped_matmul(%rows, %w, %ends)                 %out = padded_combine(%y, %weights, %places)

`padded_send` and `padded_return` are adjoint, and the identity on one rank; of several, `expert-parallel` replaces them
by `all_to_all` and `swap_blocks`: what comes in lies by rank and then by expert, and experts have their rows together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import sympy

from mgraph.ir.dims import Dim, as_dim
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


def capacity(tokens: Dim, choices: int, num_experts: int, factor: float) -> Dim:
    """The rows of each expert, C: `ceil(T·K / E · factor)`, and never more than there are tokens."""
    share = Fraction(str(factor)) * choices / num_experts
    if share >= 1:
        return tokens
    return as_dim(sympy.ceiling(sympy.Rational(share.numerator, share.denominator) * tokens))


def _padded_dispatch(x: Tensor, indices: Tensor, *, num_experts: int, factor: float) -> tuple[Tensor, Tensor]:
    """Each token to the experts that keep it, which have C rows each: x [T, N], indices i64[T, K] (E: dropped) → rows
    [E·C, N], zeros where there is no token, and the row of each pair, i64[T, K], -1 where it was dropped."""
    tokens, choices = indices.shape
    room = int(str(capacity(tokens, choices, num_experts, factor)))
    rows, places = x.new_zeros(num_experts * room, *x.shape[1:]), indices.new_full(indices.shape, -1)
    for expert in range(num_experts):
        kept = indices == expert
        token = kept.nonzero()[:, 0]
        assert len(token) <= room, f"expert {expert} keeps {len(token)} tokens, and has room for {room}"
        rows[expert * room : expert * room + len(token)] = x[token]
        places[kept] = expert * room + indices.new_ones(len(token)).cumsum(0) - 1
    return rows, places


def _infer_dispatch(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, indices = types
    if len(indices.shape) != 2 or indices.dtype is not DType.I64 or x.shape[0] != indices.shape[0]:
        raise ValueError(f"padded_dispatch: {x} and the choices {indices} do not fit")
    room = capacity(x.shape[0], int(str(indices.shape[1])), attrs["num_experts"], attrs["factor"])
    return TensorType(x.dtype, (as_dim(attrs["num_experts"] * room), *x.shape[1:])), indices


def _dispatch_gradient(request: GradientRequest) -> Sequence[Value | None]:
    """The sum of a token's rows, as of rows that came back from ranks."""
    drows = request.cotangents[0]
    assert drows is not None, "the places have no gradient"
    return request.builder.emit("unpack_rows", (drows, request.node.results[1]), {"part": 0.0}, names=["dx"])[0], None


def _of_pairs(rows: Tensor, places: Tensor) -> Tensor:
    """The row of each pair, [T, K, N]; zeros where it was dropped."""
    return rows[places.clamp(min=0)].where((places >= 0)[..., None], 0.0)


def _even_ends(rows: Tensor, *, num_experts: int) -> Tensor:
    """Where the rows of each expert end, i32[E]: each has equally many of rows [E·C, N]."""
    import torch

    room = rows.shape[0] // num_experts
    return torch.arange(1, num_experts + 1, dtype=torch.int32, device=rows.device) * room


def _padded_combine(rows: Tensor, weights: Tensor, places: Tensor, *, dtype: DType) -> Tensor:
    """`y[t] = Σ over k of weights[t, k] · rows[places[t, k]]` for the pairs that were not dropped: rows [E·C, N],
    weights [T, K], places i64[T, K] → [T, N]. Products have `dtype`, and are summed in at least f32."""
    made = to_torch_dtype(dtype)
    products = (promote(_of_pairs(rows, places)) * promote(weights)[..., None]).to(made)
    return rounded(promote(products).sum(1), rows)


def _combine_gradient(request: GradientRequest) -> Sequence[Value | None]:
    operands = (request.cotangent, *request.node.operands)
    made = request.builder.emit("padded_combine_grad", operands, names=("drows", "dweights"))
    return *made, None


def _padded_combine_grad(dy: Tensor, rows: Tensor, weights: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `padded_combine` for rows [E·C, N], zeros where there is no token, and weights [T, K]; dy [T, N]."""
    import torch

    kept = places >= 0
    dots = torch.linalg.vecdot(promote(dy)[:, None], promote(_of_pairs(rows, places)))
    drows = torch.zeros_like(rows)
    products = (promote(dy)[:, None] * promote(weights)[..., None]).to(rows.dtype)
    drows[places[kept]] = products[kept]
    return drows, dots.to(weights.dtype)


def _padded_send(rows: Tensor, *, num_experts: int) -> Tensor:
    """The rows of all experts [E·C, N], to the ranks that have these, as many rows. On one rank: what it is given."""
    return rows


def _padded_return(rows: Tensor, *, num_experts: int) -> Tensor:
    """The inverse way of `padded_send`. On one rank: what it is given."""
    return rows


def _adjoint(op: str, name: str) -> Any:
    def gradient(request: GradientRequest) -> Sequence[Value | None]:
        assert request.cotangent is not None, "there is one result"
        return request.builder.emit(op, (request.cotangent,), dict(request.node.attrs), names=[name])

    return gradient


def _swap_blocks(x: Tensor, *, first: int, second: int) -> Tensor:
    """Rows that lie by a first and then by a second index, by the second and then by the first: x [first·second·C, N] →
    [second·first·C, N]."""
    blocks: Tensor = x.unflatten(0, (first, second, -1))
    return blocks.transpose(0, 1).flatten(0, 2)


define_op(
    "padded_dispatch",
    _padded_dispatch,
    infer=_infer_dispatch,
    attrs={"num_experts": REQUIRED, "factor": REQUIRED},
    gradient=_dispatch_gradient,
    bytes=traffic,
)
define_op(
    "even_ends",
    _even_ends,
    infer=lambda types, attrs: (TensorType(DType.I32, (attrs["num_experts"],)),),
    attrs={"num_experts": REQUIRED},
)
define_op(
    "padded_combine",
    _padded_combine,
    infer=lambda types, attrs: (TensorType(types[0].dtype, (types[1].shape[0], *types[0].shape[1:])),),
    attrs={"dtype": REQUIRED},
    gradient=_combine_gradient,
    flops=per_element(2),
    bytes=traffic,
    compute_dtype="f32",
)
define_op(
    "padded_combine_grad",
    _padded_combine_grad,
    infer=lambda types, attrs: (types[1], types[2]),
    flops=per_element(3),
    bytes=traffic,
    compute_dtype="f32",
)
_SAME: dict[str, Any] = {
    "infer": lambda types, attrs: tuple(types),
    "attrs": {"num_experts": REQUIRED},
    "bytes": traffic,
}
define_op("padded_send", _padded_send, gradient=_adjoint("padded_return", "dsent"), **_SAME)
define_op("padded_return", _padded_return, gradient=_adjoint("padded_send", "dreturned"), **_SAME)
define_op(
    "swap_blocks",
    _swap_blocks,
    infer=lambda types, attrs: (types[0],),
    attrs={"first": REQUIRED, "second": REQUIRED},
    bytes=traffic,
)
