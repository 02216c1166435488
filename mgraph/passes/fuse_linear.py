"""fuse-linear: products of a serving step as ops that know what follows, which kernels for a few rows then do as well.

    %g = aten.linear.default(%x, %gate)        ==>  %y = linear_glu(%x, %gate, %up) {act = "silu"}
    %u = aten.linear.default(%x, %up)
    %y = glu(%g, %u) {act = "silu"}

    %y = aten.linear.default(%x, %w)           ==>  %s = linear(%x, %w, %r) {extra = ("residual")}
    %s = aten.add.Tensor(%y, %r)

    %y = aten.linear.default(%x, %w, %b)       ==>  %y = linear(%x, %w, %b) {extra = ("bias")}

It runs after `fuse-norm`, which takes a sum that is normalised. Where ranks hold parts of what is multiplied, the
product stays as it is: sums over ranks follow it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.graph import Function, Module, Value
from mgraph.ir.pattern import ANY, Guard, Match, capture, either, op
from mgraph.passes.base import Stage
from mgraph.passes.rewrite import RaisePass, Rule

_LINEAR = "aten.linear.default"
_PRODUCT = either(
    op(_LINEAR, capture("x"), capture("weight"), capture("bias"), args=ANY),
    op(_LINEAR, capture("x"), capture("weight")),
)
_UNIT = op(
    "glu",
    op(_LINEAR, capture("x"), capture("gate")),
    op(_LINEAR, capture("x"), capture("up")),
    act=ANY,
    alpha=ANY,
    limit=ANY,
    offset=ANY,
    name="unit",
)
_SUM = op("aten.add.Tensor", _PRODUCT, capture("residual"), commutative=True)


def _whole(match: Match) -> str | None:
    """Every rank has all of what is multiplied."""
    parts = [value for value in match.values.values() if value.tensor.placement]
    return f"ranks hold parts of {', '.join(repr(value) for value in parts)}" if parts else None


def _one_type(match: Match) -> str | None:
    """What is added has the type of the sum."""
    residual, total = match["residual"].type, match.root.result.type
    return None if residual == total else f"the residual is {residual}, the sum {total}"


def _matrix(match: Match) -> str | None:
    """A weight has two dims, and all are of one dtype."""
    found = [match[name].tensor for name in ("weight", "gate", "up") if name in match.values]
    if any(len(weight.shape) != 2 for weight in found):
        return "the weight is no matrix"
    dtypes = {value.tensor.dtype.text for value in match.values.values()}
    return f"operands are {' and '.join(sorted(dtypes))}" if len(dtypes) > 1 else None


def _emit(builder: FunctionBuilder, match: Match) -> Sequence[Value]:
    extra = tuple(name for name in ("bias", "residual") if name in match.values)
    operands = [match[name] for name in ("x", "weight", *extra)]
    return builder.emit("linear", operands, {"extra": extra} if extra else {})


def _emit_unit(builder: FunctionBuilder, match: Match) -> Sequence[Value]:
    return builder.emit("linear_glu", [match[name] for name in ("x", "gate", "up")], match.nodes["unit"].attrs)


_GUARDS = (Guard("weight", _matrix), Guard("placement", _whole))


@dataclass(frozen=True)
class FuseLinear(RaisePass):
    """Join products of a serving step with the unit or the sum that follows."""

    name: ClassVar[str] = "fuse-linear"
    stage: ClassVar[Stage] = Stage.FUSE
    conflicts: ClassVar[frozenset[str]] = frozenset({"in-place"})

    def rules(self, module: Module, function: Function) -> Sequence[Rule]:
        """Units first, then sums, then what is left."""
        return (
            Rule("linear_glu", _UNIT, (), _emit_unit, _GUARDS),
            Rule("linear_residual", _SUM, (), _emit, (Guard("type", _one_type), *_GUARDS)),
            Rule("linear", _PRODUCT, (_LINEAR,), _emit, _GUARDS),
        )
