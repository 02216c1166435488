"""Recognise mixture of experts: the router, the sort of rows by expert, grouped products, the weighted sum.

(a router: see routing.py)                                 ==>  %w, %i = moe_route(%logits) {top_k = 2, ...}

%e, %order = aten.sort.stable(%b) {stable = true}          # b: the indices, flat
%offsets = aten.searchsorted.Tensor(%e, %c) {right = true} # c: 0 .. experts - 1
%d = aten.floor_divide.default(%order) {other = 2}         ==>  %rows, %order, %offsets = moe_dispatch(%x, %i)
%rows = aten.index.Tensor(%x, %d)

%y = zoo.grouped_linear.default(%rows, %weight, %offsets)  ==>  %y = grouped_matmul(%rows, %weight, %offsets)
%z = aten.add.Tensor(%y, %b)           # b: rows of a bias, indexed by %e: one operand more

%w, %i = zoo.within_capacity.default(%v, %j)               ==>  %w, %i = moe_capacity(%v, %j)
%w, %i = zoo.without_padding.default(%v, %j, %real)        ==>  %w, %i = moe_drop_padding(%v, %j, %real)
                                   # rows that experts dropped are cleared, which the raised ops need not be told

%f = aten.argsort.default(%order)
%g = aten.index.Tensor(%y, %f)                             ==>  %z = moe_combine(%y, %w, %order)
%z = aten.sum.dim_IntList(%h) {dim = (1)}                  # h: g by token and choice, times w
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.graph import Function, Module, Value
from mgraph.ir.pattern import ANY, Guard, Match, Pattern, capture, either, op, optional_cast, where
from mgraph.passes.rewrite import RaisePass, Rule
from mgraph.passes.routing import LAST_OR_NONE, ROUTE

_ROWS_OF = ("self", "indices.0")

# The sort by expert: found from a grouped product, which reads both rows and offsets, and stays.

_GROUPED = ("zoo.grouped_linear.default", "aten._grouped_mm.default")
_CLEARED = "zoo.clear_tail.default"
"""Clears rows behind those of all experts, which dropped them; the raised ops never read them."""
_STABLE = where("a stable sort", lambda value, node: value is True)


def _dispatch() -> Pattern:
    flat = op("reshape", capture("indices"), shape=ANY, shared=True)
    order = op("aten.sort.stable", flat, result=1, name="sort", stable=_STABLE, dim=LAST_OR_NONE)
    # Biases are indexed by the sorted experts too.
    by_expert = op("aten.sort.stable", flat, name="sort_again", stable=_STABLE, dim=LAST_OR_NONE, shared=True)
    token = op("aten.floor_divide.default", order, other=ANY, name="token")
    rows = op("aten.index.Tensor", capture("x"), token, args=_ROWS_OF, binds="rows", name="rows")
    experts = op("aten.arange.default", end=ANY, shared=True, name="experts")
    offsets = op(
        "aten.searchsorted.Tensor", by_expert, experts, right=True, out_int32=True, binds="offsets", name="offsets"
    )
    cleared = op(_CLEARED, rows, offsets, binds="cleared")
    return op(_GROUPED, either(cleared, rows), capture("weight"), offsets, shared=True)


def _dispatch_shape(match: Match) -> str | None:
    x, indices = match["x"].tensor, match["indices"].tensor
    if match.nodes["sort"] is not match.nodes["sort_again"]:
        return "rows and offsets come from two sorts, expected one"
    if len(x.shape) != 2 or len(indices.shape) != 2 or x.shape[0] != indices.shape[0]:
        return f"x is {x} and the indices {indices}, expected [tokens, width] and [tokens, choices]"
    if match.attr("token", "other") != indices.shape[1]:
        return f"the order is divided by {match.attr('token', 'other')!r}, expected {indices.shape[1]}"
    experts, weight = match.attr("experts", "end"), match["weight"].tensor
    return None if experts == weight.shape[0] else f"{experts!r} experts are sorted, but the weight is {weight}"


def _dispatch_exports(match: Match) -> tuple[Value, ...]:
    rows = match["cleared" if "cleared" in match.values else "rows"]
    return rows, match.nodes["sort"].results[1], match["offsets"]


def _emit_dispatch(builder: FunctionBuilder, match: Match) -> Sequence[Value]:
    with builder.at(match.nodes["rows"]):
        attrs = {"num_experts": match["weight"].tensor.shape[0]}
        attrs |= {"others": True} if "cleared" in match.values else {}
        operands = (match["x"], match["indices"])
        return builder.emit("moe_dispatch", operands, attrs, names=("rows", "order", "offsets"))


_DISPATCH = Rule(
    "moe_dispatch",
    _dispatch(),
    ("aten.sort.stable", "aten.sort.default"),
    _emit_dispatch,
    (Guard("shape", _dispatch_shape),),
    _dispatch_exports,
)

# Grouped products.


def _grouped_shape(match: Match) -> str | None:
    rows, weight, offsets = (match[name].tensor for name in ("rows", "weight", "offsets"))
    if len(rows.shape) != 2 or len(weight.shape) != 3:
        return f"rows are {rows} and the weight {weight}, expected [rows, width] and [experts, width, out]"
    if offsets.shape != weight.shape[:1]:
        return f"the offsets are {offsets}, expected one for each of {weight.shape[0]} experts"
    return None


def _emit_grouped(builder: FunctionBuilder, match: Match) -> Sequence[Value]:
    operands = [match[name] for name in ("rows", "weight", "offsets", "bias") if name in match.values]
    return builder.emit("grouped_matmul", operands, {"transpose_w": "transposed" in match.nodes})


def _product(offsets: Pattern) -> Pattern:
    weight = capture("weight")
    transposed = op("aten.permute.default", weight, dims=(0, 2, 1), shared=True, name="transposed")
    return op(_GROUPED, capture("rows"), either(transposed, weight), offsets)


def _biased() -> Pattern:
    by_expert = op("aten.sort.stable", capture("flat"), stable=ANY, dim=ANY, shared=True, binds="by_expert")
    experts = op("aten.arange.default", end=ANY, shared=True)
    offsets = op(
        "aten.searchsorted.Tensor", by_expert, experts, right=True, out_int32=True, shared=True, binds="offsets"
    )
    # What experts dropped is numbered behind them.
    biases = either(op("aten.pad.default", capture("bias"), pad=(0, 0, 0, 1)), capture("bias"))
    bias = op("aten.index.Tensor", biases, by_expert, args=_ROWS_OF)
    return op("aten.add.Tensor", _product(offsets), bias, commutative=True)


def _bias_shape(match: Match) -> str | None:
    bias, experts, width = match["bias"].tensor, match["weight"].tensor.shape[0], match.root.result.tensor.shape[-1]
    return None if bias.shape == (experts, width) else f"the bias is {bias}, expected [experts, out]"


_GROUPED_BIAS = Rule(
    "grouped_matmul",
    _biased(),
    _GROUPED,
    _emit_grouped,
    (Guard("shape", _grouped_shape), Guard("bias", _bias_shape)),
)
_GROUPED_MATMUL = Rule(
    "grouped_matmul", _product(capture("offsets")), _GROUPED, _emit_grouped, (Guard("shape", _grouped_shape),)
)

# The weighted sum.


def _combine() -> Pattern:
    order = op("aten.sort.stable", capture("flat"), result=1, binds="order", stable=ANY, dim=ANY, shared=True)
    place = op("aten.argsort.default", order, dim=LAST_OR_NONE)
    given = either(op(_CLEARED, capture("rows"), capture("offsets")), capture("rows"))
    rows = op("aten.index.Tensor", given, place, args=_ROWS_OF)
    pairs = op("reshape", rows, shape=ANY, name="pairs")
    weights = op("reshape", optional_cast(capture("weights")), shape=ANY, name="column", shared=True)
    products = op("aten.mul.Tensor", optional_cast(pairs), optional_cast(weights), commutative=True, name="products")
    total = op("aten.sum.dim_IntList", products, dim=(1,))
    return either(op("cast", total, dtype=ANY), total)


def _combine_shape(match: Match) -> str | None:
    pairs, weights = match.nodes["pairs"].result.tensor, match["weights"].tensor
    column = match.nodes["column"].result.tensor
    if len(weights.shape) != 2 or pairs.shape != (*weights.shape, match["rows"].tensor.shape[1]):
        return (
            f"rows are seen as {pairs} and weights are {weights}, expected [tokens, choices, width] and its first two"
        )
    if column.shape != (*weights.shape, 1):
        return f"weights are seen as {column}, expected one number for each row"
    return None


def _combine_dtype(match: Match) -> str | None:
    rows, result = match["rows"].tensor.dtype, match.root.result.tensor.dtype
    return None if rows is result else f"the result is {result!r}, expected {rows!r} like the rows"


def _emit_combine(builder: FunctionBuilder, match: Match) -> Sequence[Value]:
    operands = [match[name] for name in ("rows", "weights", "order", "offsets") if name in match.values]
    return builder.emit("moe_combine", operands, {"dtype": match.nodes["products"].result.tensor.dtype})


_COMBINE = Rule(
    "moe_combine",
    _combine(),
    ("aten.argsort.default",),
    _emit_combine,
    (Guard("shape", _combine_shape), Guard("dtype", _combine_dtype)),
)


# Capacity.


def _emit_capacity(builder: FunctionBuilder, match: Match) -> Sequence[Value]:
    attrs = {name: match.attr("capacity", name) for name in ("num_experts", "factor", "keep")}
    return builder.emit("moe_capacity", (match["weights"], match["indices"]), attrs, names=("kept", "kept_indices"))


def _both(match: Match) -> tuple[Value, ...]:
    return match.root.results


_CAPACITY = Rule(
    "moe_capacity",
    op(
        "zoo.within_capacity.default",
        capture("weights"),
        capture("indices"),
        num_experts=ANY,
        factor=ANY,
        keep=ANY,
        name="capacity",
    ),
    (),
    _emit_capacity,
    (),
    _both,
)


def _emit_padding(builder: FunctionBuilder, match: Match) -> Sequence[Value]:
    operands = (match["weights"], match["indices"], match["real"])
    attrs = {"num_experts": match.attr("padding", "num_experts")}
    return builder.emit("moe_drop_padding", operands, attrs, names=("real_weights", "real_indices"))


_PADDING = Rule(
    "moe_drop_padding",
    op(
        "zoo.without_padding.default",
        capture("weights"),
        capture("indices"),
        capture("real"),
        num_experts=ANY,
        name="padding",
    ),
    (),
    _emit_padding,
    (),
    _both,
)


@dataclass(frozen=True)
class RaiseMoe(RaisePass):
    """Raise routing, capacity, dispatch, grouped products and combination."""

    name: ClassVar[str] = "raise-moe"

    def rules(self, module: Module, function: Function) -> Sequence[Rule]:
        """The same rules everywhere."""
        return (ROUTE, _PADDING, _CAPACITY, _DISPATCH, _GROUPED_BIAS, _GROUPED_MATMUL, _COMBINE)
