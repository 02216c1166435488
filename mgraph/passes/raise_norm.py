"""Recognise RMS and layer normalisation.

    %a: f32[B, S, 64] = cast(%x) {dtype = f32}
    %b: f32[B, S, 64] = aten.pow.Tensor_Scalar(%a) {exponent = 2}
    %c: f32[B, S, 1] = aten.mean.dim(%b) {dim = (-1), keepdim = true}
    %d: f32[B, S, 1] = aten.add.Tensor(%c) {other = 1e-05}             ==>  %y: bf16[B, S, 64], %rstd: f32[B, S, 1]
    %e: f32[B, S, 1] = aten.rsqrt.default(%d)                               = rms_norm(%x, %w)
    %f: f32[B, S, 64] = aten.mul.Tensor(%a, %e)                               {eps = 1e-05, round = "normed"}
    %g: bf16[B, S, 64] = cast(%f) {dtype = bf16}
    %y: bf16[B, S, 64] = aten.mul.Tensor(%g, %w)

Three tails are known: the cast before the product with the weight (`normed`), after it (`product`), and after a product
with `weight + offset`. Without casts (all in one dtype) `product` says the same. `aten.rms_norm` is a `product`.

    %y = aten.layer_norm.default(%x, %w, %b) {eps = 1e-05}             ==>  %y, %mean, %rstd = layer_norm(%x, %w, %b)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.graph import Function, Module, Value
from mgraph.ir.pattern import ANY, LAST_DIM, NUMBER, Guard, Match, Pattern, capture, either, op, optional_cast, where
from mgraph.ir.types import DType
from mgraph.passes.rewrite import RaisePass, Rule

_LAYER_EPS = 1e-5  # torch's own default
_GIVEN = where("a number (what torch adds by default depends on the dtype)", NUMBER.test)


def _normed() -> Pattern:
    wide = optional_cast(capture("x"))
    square = either(
        op("aten.pow.Tensor_Scalar", wide, exponent=where("2", lambda value, node: value == 2)),
        op("aten.mul.Tensor", wide, wide),
    )
    mean = op("aten.mean.dim", square, dim=LAST_DIM, keepdim=True)
    rstd = op("aten.rsqrt.default", op("aten.add.Tensor", mean, other=NUMBER, name="eps"), name="rsqrt")
    return op("aten.mul.Tensor", wide, rstd, commutative=True)


def _scaled(normed: Pattern) -> Pattern:
    weight = optional_cast(capture("weight"))
    scale = either(op("aten.add.Tensor", weight, other=NUMBER, name="offset"), weight)
    return op("aten.mul.Tensor", normed, scale, commutative=True)


_CHAIN = either(
    op("cast", _scaled(_normed()), dtype=ANY, name="after"),
    _scaled(op("cast", _normed(), dtype=ANY, name="before")),
    _scaled(_normed()),
)


def _dtype(match: Match) -> str | None:
    """All of the arithmetic is f32 or wider, and the result (and the rounding before the weight) is like x."""
    x, y = match["x"].tensor.dtype, match.root.result.tensor.dtype
    wide = match.nodes["rsqrt"].result.tensor.dtype
    if wide not in (DType.F32, DType.F64):
        return f"it is computed in {wide!r}, expected f32 or f64"
    if y is not x:
        return f"the result is {y!r}, expected {x!r} like x"
    before = match.attr("before", "dtype", x)
    return None if before is x else f"the normalised value is rounded to {before!r}, expected {x!r}"


def _same_dtype(match: Match) -> str | None:
    """Torch computes in f32 and rounds once where all of its operands are of one dtype."""
    dtypes = {match[name].tensor.dtype for name in ("x", "weight", "bias")}
    return None if len(dtypes) == 1 else f"x, weight and bias have several dtypes: {sorted(map(repr, dtypes))}"


def _shape(match: Match) -> str | None:
    x, weight = match["x"].tensor, match["weight"].tensor
    if weight.shape != x.shape[-1:]:
        return f"the weight is {weight}, expected one number for each of the last dim of {x}"
    return None


def _emit(builder: FunctionBuilder, match: Match) -> Sequence[Value]:
    attrs = {
        "eps": match.attr("eps", "other"),
        "offset": float(match.attr("offset", "other", 0.0)),
        "round": "normed" if "before" in match.nodes else "product",
    }
    return builder.emit("rms_norm", (match["x"], match["weight"]), attrs, names=("rms_norm", "rstd"))[:1]


def _emit_torch(builder: FunctionBuilder, match: Match) -> Sequence[Value]:
    attrs = {"eps": match.attr("norm", "eps"), "offset": 0.0, "round": "product"}
    return builder.emit("rms_norm", (match["x"], match["weight"]), attrs, names=("rms_norm", "rstd"))[:1]


def _emit_layer(builder: FunctionBuilder, match: Match) -> Sequence[Value]:
    operands = (match["x"], match["weight"], match["bias"])
    attrs = {"eps": match.attr("norm", "eps", _LAYER_EPS)}
    return builder.emit("layer_norm", operands, attrs, names=("layer_norm", "mean", "rstd"))[:1]


_SHAPE = Guard("shape", _shape)
_RULES = (
    Rule(
        "rms_norm",
        op("aten.rms_norm.default", capture("x"), capture("weight"), normalized_shape=ANY, eps=_GIVEN, name="norm"),
        ("aten.rms_norm.default",),
        _emit_torch,
        (_SHAPE,),
    ),
    Rule(
        "layer_norm",
        op(
            "aten.layer_norm.default",
            *map(capture, ("x", "weight", "bias")),
            normalized_shape=ANY,
            eps=ANY,
            cudnn_enable=ANY,
            name="norm",
        ),
        ("aten.layer_norm.default",),
        _emit_layer,
        (_SHAPE, Guard("dtype", _same_dtype)),
    ),
    Rule("rms_norm", _CHAIN, ("aten.rsqrt.default",), _emit, (_SHAPE, Guard("dtype", _dtype))),
)


@dataclass(frozen=True)
class RaiseNorm(RaisePass):
    """Raise RMS and layer normalisation."""

    name: ClassVar[str] = "raise-norm"

    def rules(self, module: Module, function: Function) -> Sequence[Rule]:
        """The same rules everywhere."""
        return _RULES
