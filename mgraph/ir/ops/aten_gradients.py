"""Gradients of torch ops, written by hand where ours is shorter or cheaper than a trace of torch's own.

Every rule takes a GradientRequest and gives one gradient per operand (`None`: none). All others are traced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from mgraph.ir.dims import Dim, product
from mgraph.ir.graph import Value
from mgraph.ir.opdef import GradientRequest
from mgraph.ir.traced_gradient import traced_gradient
from mgraph.ir.types import DType, TensorType

Rule = Callable[[GradientRequest], Sequence[Value | None]]
_RULES: dict[str, Rule] = {}


def aten_gradient(request: GradientRequest) -> Sequence[Value | None]:
    """The gradient of a torch op: by rule, else by trace. The rules are those of real numbers."""
    values = (*request.node.operands, *request.node.results)
    if any(v.tensor.dtype is DType.C64 for v in values):
        return traced_gradient(request)
    return _RULES.get(request.node.op, traced_gradient)(request)


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        for name in names:
            _RULES[f"aten.{name}"] = rule
        return rule

    return register


def _op(request: GradientRequest, name: str, *operands: Value, **attrs: Any) -> Value:
    return request.builder.one(f"aten.{name}", *operands, **attrs)


def sum_to(request: GradientRequest, value: Value, type_: TensorType) -> Value:
    """Undo broadcasting: sum a cotangent over the dims that were expanded, and cast it to the operand's dtype."""
    shape, target = value.tensor.shape, type_.shape
    lead = len(shape) - len(target)
    expanded = tuple(i for i in range(len(shape)) if i < lead or (target[i - lead] == 1 and shape[i] != 1))
    if expanded:
        value = _op(request, "sum.dim_IntList", value, dim=expanded)
    if value.tensor.shape != target:
        value = request.builder.one("reshape", value, shape=target)
    if value.tensor.dtype is not type_.dtype:
        value = request.builder.one("cast", value, dtype=type_.dtype)
    return value


def _to_operands(request: GradientRequest, *grads: Value | Callable[[], Value] | None) -> list[Value | None]:
    made: list[Value | None] = []
    for operand, need, grad in zip(request.node.operands, request.needs, grads, strict=True):
        if not need or grad is None:
            made.append(None)
        else:
            made.append(sum_to(request, grad() if callable(grad) else grad, operand.tensor))
    return made


@_rule("add.Tensor", "add.Scalar", "sub.Tensor", "sub.Scalar")
def _add(request: GradientRequest) -> Sequence[Value | None]:
    g, alpha = request.cotangent, request.node.attrs.get("alpha", 1)
    factor = -alpha if ".sub." in request.node.op else alpha  # type: ignore[operator]
    second: Callable[[], Value] = (lambda: g) if factor == 1 else (lambda: _op(request, "mul.Scalar", g, other=factor))
    return _to_operands(request, *[lambda: g, second][: len(request.node.operands)])


@_rule("mul.Tensor", "mul.Scalar")
def _mul(request: GradientRequest) -> Sequence[Value | None]:
    g, operands = request.cotangent, request.node.operands
    if len(operands) == 1:
        return _to_operands(request, lambda: _op(request, "mul.Scalar", g, other=request.node.attrs["other"]))
    a, b = operands
    return _to_operands(request, lambda: _op(request, "mul.Tensor", g, b), lambda: _op(request, "mul.Tensor", g, a))


@_rule("div.Tensor", "div.Scalar")
def _div(request: GradientRequest) -> Sequence[Value | None]:
    g, operands = request.cotangent, request.node.operands
    if len(operands) == 1:
        return _to_operands(request, lambda: _op(request, "div.Scalar", g, other=request.node.attrs["other"]))
    divisor, quotient = operands[1], request.node.result

    def of_divisor() -> Value:
        return _op(request, "neg.default", _op(request, "div.Tensor", _op(request, "mul.Tensor", g, quotient), divisor))

    return _to_operands(request, lambda: _op(request, "div.Tensor", g, divisor), of_divisor)


@_rule("neg.default")
def _neg(request: GradientRequest) -> Sequence[Value | None]:
    return [_op(request, "neg.default", request.cotangent)]


@_rule("detach.default")
def _detach(request: GradientRequest) -> Sequence[Value | None]:
    return [None]


@_rule("silu.default")
def _silu(request: GradientRequest) -> Sequence[Value | None]:
    return [_op(request, "silu_backward.default", request.cotangent, request.node.operands[0])]


@_rule("gelu.default")
def _gelu(request: GradientRequest) -> Sequence[Value | None]:
    return [_op(request, "gelu_backward.default", request.cotangent, request.node.operands[0], **request.node.attrs)]


@_rule("tanh.default")
def _tanh(request: GradientRequest) -> Sequence[Value | None]:
    return [_op(request, "tanh_backward.default", request.cotangent, request.node.result)]


@_rule("sigmoid.default")
def _sigmoid(request: GradientRequest) -> Sequence[Value | None]:
    return [_op(request, "sigmoid_backward.default", request.cotangent, request.node.result)]


@_rule("exp.default")
def _exp(request: GradientRequest) -> Sequence[Value | None]:
    return [_op(request, "mul.Tensor", request.cotangent, request.node.result)]


@_rule("rsqrt.default")
def _rsqrt(request: GradientRequest) -> Sequence[Value | None]:
    cube = _op(request, "pow.Tensor_Scalar", request.node.result, exponent=3)
    return [_op(request, "mul.Scalar", _op(request, "mul.Tensor", request.cotangent, cube), other=-0.5)]


@_rule("pow.Tensor_Scalar")
def _pow(request: GradientRequest) -> Sequence[Value | None]:
    exponent = request.node.attrs["exponent"]
    assert isinstance(exponent, int | float)
    base = request.node.operands[0]
    lower = base if exponent == 2 else _op(request, "pow.Tensor_Scalar", base, exponent=exponent - 1)
    return [_op(request, "mul.Tensor", request.cotangent, _op(request, "mul.Scalar", lower, other=exponent))]


def _spread(request: GradientRequest, scale: Dim | None) -> list[Value | None]:
    """The gradient of a sum (or mean over `scale` elements) over dims: the cotangent, expanded back."""
    node, operand = request.node, request.node.operands[0].tensor
    dims, grad = node.attrs.get("dim"), request.cotangent
    rank = len(operand.shape)
    reduced = {d % rank for d in dims} if isinstance(dims, tuple) else set(range(rank))
    kept = tuple(1 if i in reduced else d for i, d in enumerate(operand.shape))
    if grad.tensor.shape != kept:
        grad = request.builder.one("reshape", grad, shape=kept)
    if scale is not None:
        grad = _op(request, "div.Scalar", grad, other=scale)
    if grad.tensor.dtype is not operand.dtype:
        grad = request.builder.one("cast", grad, dtype=operand.dtype)
    return [_op(request, "expand.default", grad, size=operand.shape)]


@_rule("sum.dim_IntList", "sum.default")
def _sum(request: GradientRequest) -> Sequence[Value | None]:
    return _spread(request, None)


@_rule("mean.dim", "mean.default")
def _mean(request: GradientRequest) -> Sequence[Value | None]:
    shape, dims = request.node.operands[0].tensor.shape, request.node.attrs.get("dim")
    count = product(shape[d] for d in dims) if isinstance(dims, tuple) else product(shape)
    return _spread(request, count)


@_rule("_softmax.default", "softmax.int")
def _softmax(request: GradientRequest) -> Sequence[Value | None]:
    result, operand = request.node.result, request.node.operands[0].tensor
    made = request.builder.one(
        "aten._softmax_backward_data.default",
        request.cotangent,
        result,
        dim=request.node.attrs["dim"],
        input_dtype=result.tensor.dtype,
    )
    return [sum_to(request, made, operand)]


@_rule("linear.default")
def _linear(request: GradientRequest) -> Sequence[Value | None]:
    """dx keeps its leading dims; dw is one matrix product over all rows."""
    x, weight, *bias = request.node.operands
    g = request.cotangent
    made: list[Value | None] = [_op(request, "matmul.default", g, weight) if request.needs[0] else None]
    rows, flat = _as_rows(request, g), _as_rows(request, x)
    made.append(_op(request, "mm.default", _op(request, "t.default", rows), flat) if request.needs[1] else None)
    if bias:
        made.append(_op(request, "sum.dim_IntList", rows, dim=(0,)) if request.needs[2] else None)
    return made


@_rule("mm.default")
def _mm(request: GradientRequest) -> Sequence[Value | None]:
    a, b = request.node.operands
    g = request.cotangent
    return [
        _op(request, "mm.default", g, _op(request, "t.default", b)) if request.needs[0] else None,
        _op(request, "mm.default", _op(request, "t.default", a), g) if request.needs[1] else None,
    ]


@_rule("bmm.default")
def _bmm(request: GradientRequest) -> Sequence[Value | None]:
    a, b = request.node.operands
    g = request.cotangent
    return [
        _op(request, "bmm.default", g, _swapped(request, b)) if request.needs[0] else None,
        _op(request, "bmm.default", _swapped(request, a), g) if request.needs[1] else None,
    ]


@_rule("matmul.default")
def _matmul(request: GradientRequest) -> Sequence[Value | None]:
    """A vector counts as a matrix of one row (left) or column (right); leading dims broadcast.

    No trace: torch 2.11 takes the op apart in C++, where named dims become numbers.
    """
    a, b = request.node.operands
    rows, columns = _as_matrix(request, a, 0), _as_matrix(request, b, 1)
    lead = request.cotangent.tensor.shape[: max(len(rows.tensor.shape), len(columns.tensor.shape)) - 2]
    shape = (*lead, rows.tensor.shape[-2], columns.tensor.shape[-1])
    g = request.builder.one("reshape", request.cotangent, shape=shape)
    made: list[Value | None] = [None, None]
    if request.needs[0]:
        made[0] = sum_to(request, _op(request, "matmul.default", g, _swapped(request, columns)), rows.tensor)
    if request.needs[1] and len(columns.tensor.shape) == 2:
        flat_rows, flat_g = _as_rows(request, rows), _as_rows(request, g)
        made[1] = _op(request, "mm.default", _op(request, "t.default", flat_rows), flat_g)
    elif request.needs[1]:
        made[1] = sum_to(request, _op(request, "matmul.default", _swapped(request, rows), g), columns.tensor)
    return [m and request.builder.one("reshape", m, shape=v.tensor.shape) for m, v in zip(made, (a, b), strict=True)]


def _as_matrix(request: GradientRequest, value: Value, column: int) -> Value:
    """A vector as a matrix with one row, or with one `column`; matrices as they are."""
    if len(value.tensor.shape) > 1:
        return value
    size = value.tensor.shape[0]
    return request.builder.one("reshape", value, shape=(size, 1) if column else (1, size))


def _as_rows(request: GradientRequest, value: Value) -> Value:
    """All leading dims as one."""
    shape = value.tensor.shape
    return request.builder.one("reshape", value, shape=(product(shape[:-1]), shape[-1]))


def _swapped(request: GradientRequest, value: Value) -> Value:
    """The last two dims exchanged."""
    return _op(request, "transpose.int", value, dim0=-2, dim1=-1)


@_rule("scaled_dot_product_attention.default")
def _attention(request: GradientRequest) -> Sequence[Value | None]:
    """With P = softmax(Q K^T scale + mask) and dP = dO V^T:

    dV = P^T dO,    dS = P (dP - rowsum(P dP)),    dQ = dS K scale,    dK = dS^T Q scale,    dmask = dS

    P is made again from the operands. Keys and values of a group of heads get the sum over it.
    """
    attrs, (q, k, v, *masks) = request.node.attrs, request.node.operands
    if attrs.get("dropout_p", 0.0) or q.tensor.dtype is not k.tensor.dtype:
        return traced_gradient(request)
    size = q.tensor.shape[-1]
    assert isinstance(size, int), f"{request.node!r}: heads of unknown size {size}"
    scale = attrs.get("scale", size**-0.5)
    keys, values = (_of_all_heads(request, x, q.tensor.shape) for x in (k, v))
    scores = _op(request, "mul.Scalar", _op(request, "matmul.default", q, _swapped(request, keys)), other=scale)
    seen = _causal(request, scores) if attrs.get("is_causal") else next(iter(masks), None)
    if seen is not None and seen.tensor.dtype is DType.BOOL:
        least = _op(request, "full_like.default", scores, fill_value=-math.inf)
        scores = _op(request, "where.self", seen, scores, least)
    elif seen is not None:
        scores = _op(request, "add.Tensor", scores, seen)
    weights = _op(request, "_safe_softmax.default", scores, dim=-1)
    g = request.cotangent
    of_weights = _op(request, "matmul.default", g, _swapped(request, values))
    of_scores = _op(
        request, "_softmax_backward_data.default", of_weights, weights, dim=-1, input_dtype=weights.tensor.dtype
    )
    scaled = _op(request, "mul.Scalar", of_scores, other=scale)
    made: list[Value | None] = [
        sum_to(request, _op(request, "matmul.default", scaled, keys), q.tensor) if request.needs[0] else None,
        _of_groups(request, scaled, q, k.tensor) if request.needs[1] else None,
        _of_groups(request, weights, g, v.tensor) if request.needs[2] else None,
    ]
    return [
        *made,
        *(
            sum_to(request, of_scores, m.tensor) if need else None
            for m, need in zip(masks, request.needs[3:], strict=True)
        ),
    ]


def _of_all_heads(request: GradientRequest, value: Value, query: Sequence[Dim]) -> Value:
    """Keys or values [..., G, T, D] for each of the query's heads: [..., H, T, D], each repeated H / G times."""
    shape = value.tensor.shape
    if len(shape) < 3 or shape[-3] == query[-3] or shape[-3] == 1:
        return value
    times = query[-3] // shape[-3]
    wide = _op(request, "unsqueeze.default", value, dim=-3)
    wide = _op(request, "expand.default", wide, size=(*shape[:-2], times, *shape[-2:]))
    return request.builder.one("reshape", wide, shape=(*shape[:-3], query[-3], *shape[-2:]))


def _of_groups(request: GradientRequest, weights: Value, rows: Value, type_: TensorType) -> Value:
    """weights^T rows, summed over the heads that share keys and values of a type."""
    made = _op(request, "matmul.default", _swapped(request, weights), rows)
    shape, target = made.tensor.shape, type_.shape
    if len(target) >= 3 and target[-3] not in (1, shape[-3]):
        times = shape[-3] // target[-3]
        made = request.builder.one("reshape", made, shape=(*shape[:-3], target[-3], times, *shape[-2:]))
        made = _op(request, "sum.dim_IntList", made, dim=(-3,))
    return sum_to(request, made, type_)


def _causal(request: GradientRequest, scores: Value) -> Value:
    """bool[S, T]: which keys a causal query sees; both begin at position 0."""
    ones = _op(request, "ones.default", size=scores.tensor.shape[-2:], dtype=DType.BOOL)
    return _op(request, "tril.default", ones)


@_rule("transpose.int")
def _transpose(request: GradientRequest) -> Sequence[Value | None]:
    return [_op(request, "transpose.int", request.cotangent, **request.node.attrs)]


@_rule("t.default")
def _t(request: GradientRequest) -> Sequence[Value | None]:
    return [_op(request, "t.default", request.cotangent)]


@_rule("permute.default")
def _permute(request: GradientRequest) -> Sequence[Value | None]:
    dims = request.node.attrs["dims"]
    assert isinstance(dims, tuple)
    rank = len(dims)
    positive = [int(d) % rank for d in dims]
    return [_op(request, "permute.default", request.cotangent, dims=tuple(positive.index(i) for i in range(rank)))]


@_rule("unsqueeze.default", "squeeze.dim", "squeeze.dims")
def _reshaped(request: GradientRequest) -> Sequence[Value | None]:
    return [request.builder.one("reshape", request.cotangent, shape=request.node.operands[0].tensor.shape)]


@_rule("expand.default")
def _expand(request: GradientRequest) -> Sequence[Value | None]:
    return [sum_to(request, request.cotangent, request.node.operands[0].tensor)]


@_rule("cat.default")
def _cat(request: GradientRequest) -> Sequence[Value | None]:
    dim = request.node.attrs.get("dim", 0)
    start: Dim = 0
    made: list[Value | None] = []
    for operand, need in zip(request.node.operands, request.needs, strict=True):
        end = start + operand.tensor.shape[dim]  # type: ignore[index]
        made.append(_op(request, "slice.Tensor", request.cotangent, dim=dim, start=start, end=end) if need else None)
        start = end
    return made


@_rule("slice.Tensor")
def _slice(request: GradientRequest) -> Sequence[Value | None]:
    attrs, operand = request.node.attrs, request.node.operands[0].tensor
    dim = attrs.get("dim", 0)
    assert isinstance(dim, int)
    extent = operand.shape[dim]
    end = attrs.get("end")
    if end is None or (isinstance(end, int) and end >= 2**62):
        end = extent
    return [
        _op(
            request,
            "slice_backward.default",
            request.cotangent,
            input_sizes=operand.shape,
            dim=dim,
            start=attrs.get("start") or 0,
            end=end,
            step=attrs.get("step", 1),
        )
    ]


@_rule("embedding.default")
def _embedding(request: GradientRequest) -> Sequence[Value | None]:
    weight, indices = request.node.operands
    return [
        _op(
            request,
            "embedding_dense_backward.default",
            request.cotangent,
            indices,
            num_weights=weight.tensor.shape[0],
            padding_idx=request.node.attrs.get("padding_idx", -1),
            scale_grad_by_freq=False,
        ),
        None,
    ]


@_rule("where.self")
def _where(request: GradientRequest) -> Sequence[Value | None]:
    condition, g = request.node.operands[0], request.cotangent

    def chosen(first: bool) -> Value:
        zero = _op(request, "zeros_like.default", g)
        return _op(request, "where.self", condition, *((g, zero) if first else (zero, g)))

    return _to_operands(request, None, lambda: chosen(True), lambda: chosen(False))


@_rule("masked_fill.Scalar")
def _masked_fill(request: GradientRequest) -> Sequence[Value | None]:
    return [_op(request, "masked_fill.Scalar", request.cotangent, request.node.operands[1], value=0), None]


@_rule("gather.default")
def _gather(request: GradientRequest) -> Sequence[Value | None]:
    operand = request.node.operands[0].tensor
    zeros = _op(request, "zeros.default", size=operand.shape, dtype=operand.dtype)
    dim = request.node.attrs["dim"]
    return [
        request.builder.one("aten.scatter_add.default", zeros, request.node.operands[1], request.cotangent, dim=dim),
        None,
    ]


@_rule("topk.default", "sort.default")
def _topk(request: GradientRequest) -> Sequence[Value | None]:
    operand = request.node.operands[0].tensor
    zeros = _op(request, "zeros.default", size=operand.shape, dtype=operand.dtype)
    dim = request.node.attrs.get("dim", -1)
    return [
        request.builder.one("aten.scatter.src", zeros, request.node.results[1], request.cotangent, dim=dim),
    ]
