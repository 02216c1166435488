"""fuse-residual: what a product is added to is read where the product is written.

    %y: bf16[B, S, 64] = aten.linear.default(%x, %w)        ==>    %t: bf16[64, 96] = aten.t.default(%w)
    %s: bf16[B, S, 64] = aten.add.Tensor(%r, %y)                   %s: bf16[B, S, 64] = matmul_add(%r, %x, %t)

So the product passes through memory no more, and the sum is rounded once. It runs before `fuse-norm`, which would have
read both to make the sum: where the norm of the sum follows, it reads the sum alone, one pass over memory less; where
none follows in this function, two. Only low-precision sums gain, as libraries have kernels with such an end for them
alone. A residual that a pointwise op makes for this sum is left to `fuse-regions`, which then adds where that is made.
Where ranks hold parts of the weight, sums over ranks follow the product, and it stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.graph import Function, Module, Value
from mgraph.ir.ops.region import STEPS
from mgraph.ir.pattern import Guard, Match, capture, op
from mgraph.ir.types import DType
from mgraph.passes.base import Stage
from mgraph.passes.rewrite import RaisePass, Rule

_LINEAR, _ADD = "aten.linear.default", "aten.add.Tensor"
_SUM = op(
    _ADD,
    op(_LINEAR, capture("x"), capture("weight"), binds="product"),
    capture("residual"),
    commutative=True,
)


def _type(match: Match) -> str | None:
    """All has one type, of low precision."""
    residual, product, total = match["residual"].type, match["product"].type, match.root.result.type
    if not residual == product == total:
        return f"the residual is {residual}, the product {product}, the sum {total}"
    dtypes = {match[name].tensor.dtype for name in ("x", "weight", "product")}
    low = len(dtypes) == 1 and dtypes <= {DType.BF16, DType.F16}
    return None if low else f"it multiplies {' and '.join(sorted(dtype.text for dtype in dtypes))}"


def _weight(match: Match) -> str | None:
    """The weight is a matrix, and whole."""
    weight = match["weight"].tensor
    if len(weight.shape) != 2:
        return "the weight is no matrix"
    return f"ranks hold parts of {match['weight']!r}" if weight.placement else None


def _emit(builder: FunctionBuilder, match: Match) -> Sequence[Value]:
    turned = builder.one("aten.t.default", match["weight"])
    return builder.emit(
        "matmul_add",
        (match["residual"], match["x"], turned),
        types=[match.root.result.type],
        names=[match.root.result.name],
    )


@dataclass(frozen=True)
class FuseResidual(RaisePass):
    """Add residuals in the products that are added to them."""

    name: ClassVar[str] = "fuse-residual"
    stage: ClassVar[Stage] = Stage.FUSE
    conflicts: ClassVar[frozenset[str]] = frozenset({"in-place"})

    def rules(self, module: Module, function: Function) -> Sequence[Rule]:
        """The one rule."""
        makers, users = function.producers(), function.users()

        def region(match: Match) -> str | None:
            """No pointwise op makes the residual for this sum alone, but for a sum of this kind."""
            residual = match["residual"]
            maker = makers.get(residual)
            if maker is None or maker.op not in STEPS or len(users[residual]) > 1 or residual in function.results:
                return None
            products = [made for value in maker.operands if (made := makers.get(value)) and made.op == _LINEAR]
            return None if maker.op == _ADD and products else f"`{maker.id}` makes the residual"

        guards = Guard("type", _type), Guard("weight", _weight), Guard("region", region)
        return (Rule("residual", _SUM, (_LINEAR,), _emit, guards),)
