"""fuse-rope: QK-norm and the rotary embedding of it in one op, and backward the gradients of both.

    %n: bf16[B, S, 4, 16], %rstd = rms_norm(%x, %w)             ==>  %c, %s = … of %cos and %sin
    %p: bf16[B, 4, S, 16] = aten.permute.default(%n) {…}             %r, %rstd = norm_rope(%x, %w, %c, %s)
    %y: bf16[B, 4, S, 16] = rope(%p, %cos, %sin)                     %y = aten.permute.default(%r) {…}

    %t: bf16[B, 4, S, 16] = rope(%d, %cos, %sin) {inverse}      ==>  %g, %c, %s = … of %d, %cos and %sin
    %p: bf16[B, S, 4, 16] = aten.permute.default(%t) {…}             %dx, %dw = norm_rope_grad(%g, %x, %w, %c, %s, %r)
    %dx, %dw = rms_norm_grad(%p, %x, %w, %r)

The heads are permuted after both in place of between them, which moves no data: so all that the norm has beside its
result stays as it was, and either half may be fused without the other. What is normalised is read by nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.graph import Function, Module, Value
from mgraph.ir.pattern import ANY, Guard, Match, Pattern, capture, either, op, where
from mgraph.ir.types import Shard, TensorType
from mgraph.passes.base import Stage
from mgraph.passes.fuse_norm import in_time
from mgraph.passes.rewrite import RaisePass, Rule

_FALSE = where("false", lambda value, node: not value)


def _permuted(inner: Pattern) -> Pattern:
    return either(op("aten.permute.default", inner, dims=ANY, name="permute"), inner)


_FORWARD = op(
    "rope",
    _permuted(op("rms_norm", capture("x"), capture("weight"), name="norm", binds="n", eps=ANY, offset=ANY, round=ANY)),
    capture("cos"),
    capture("sin"),
    style=ANY,
    inverse=_FALSE,
    name="rope",
)
_BACKWARD = op(
    "rms_norm_grad",
    _permuted(
        op(
            "rope",
            capture("dy"),
            capture("cos"),
            capture("sin"),
            style=ANY,
            inverse=True,
            name="rope",
        )
    ),
    capture("x"),
    capture("weight"),
    capture("rstd"),
    name="norm",
    eps=ANY,
    offset=ANY,
    round=ANY,
)


def _dims(match: Match) -> tuple[int, ...]:
    """The permutation between the norm and the rotation, in the order in which they are."""
    rank = len(match["x"].tensor.shape)
    given = match.attr("permute", "dims", tuple(range(rank)))
    return tuple(dim % rank for dim in given)


def _rows_stay(match: Match) -> str | None:
    dims = _dims(match)
    return None if dims[-1] == len(dims) - 1 else f"`permute` has dims = {dims}, which moves what is normalised"


def _one_dtype(match: Match) -> str | None:
    x, dy = match["x"].tensor.dtype, match["dy"].tensor.dtype
    return None if x is dy else f"the gradient is {dy!r}, expected {x!r} like x"


def _forward_exports(match: Match) -> tuple[Value, ...]:
    return match.root.result, match.nodes["norm"].results[1]


def _backward_exports(match: Match) -> tuple[Value, ...]:
    return match.root.results


def _emit_forward(builder: FunctionBuilder, match: Match) -> Sequence[Value]:
    dims = _dims(match)
    inverse = tuple(dims.index(i) for i in range(len(dims)))
    tables = [_moved(builder, match[name], inverse) for name in ("cos", "sin")]
    y, rstd = _forward_exports(match)
    types = (match["n"].type, rstd.type)
    operands = (match["x"], match["weight"], *tables)
    made = builder.emit("norm_rope", operands, _attrs(match), types=types, names=(y.name, rstd.name))
    if dims == inverse == tuple(range(len(dims))):
        return made
    permuted = builder.emit("aten.permute.default", made[:1], {"dims": dims}, types=(y.type,), names=(y.name,))
    return permuted[0], made[1]


def _emit_backward(builder: FunctionBuilder, match: Match) -> Sequence[Value]:
    dims = _dims(match)
    dy, cos, sin = (_moved(builder, match[name], dims) for name in ("dy", "cos", "sin"))
    operands = (dy, match["x"], match["weight"], cos, sin, match["rstd"])
    results = match.root.results
    types, names = [v.type for v in results], [v.name for v in results]
    return builder.emit("norm_rope_grad", operands, _attrs(match), types=types, names=names)


def _attrs(match: Match) -> dict[str, object]:
    return {**match.nodes["norm"].attrs, "style": match.attr("rope", "style", "half")}


def _moved(builder: FunctionBuilder, value: Value, dims: tuple[int, ...]) -> Value:
    """A value, with leading dims of extent 1 as it needs them, permuted: dim i is then what was dim `dims[i]`."""
    if dims == tuple(range(len(dims))):
        return value
    missing = len(dims) - len(value.tensor.shape)
    if missing:
        shape = (1,) * missing + value.tensor.shape
        places = [i - missing for i in range(len(dims))]
        type_ = _placed(value.tensor, shape, places)
        (value,) = builder.emit("reshape", (value,), {"shape": shape}, types=(type_,), names=(value.name,))
    type_ = _placed(value.tensor, tuple(value.tensor.shape[dim] for dim in dims), dims)
    (moved,) = builder.emit("aten.permute.default", (value,), {"dims": dims}, types=(type_,), names=(value.name,))
    return moved


def _placed(old: TensorType, shape: tuple[object, ...], source: Sequence[int]) -> TensorType:
    """The type of a view with this shape, whose dim i is dim `source[i]` of the old one (negative: it is new)."""
    type_ = TensorType(old.dtype, shape)
    for axis, placement in old.placement:
        moved = replace(placement, dim=list(source).index(placement.dim)) if isinstance(placement, Shard) else placement
        type_ = type_.place(axis, moved)
    return type_


@dataclass(frozen=True)
class FuseRope(RaisePass):
    """Join QK-norms and the rotary embedding of what they give, forward and backward."""

    name: ClassVar[str] = "fuse-rope"
    stage: ClassVar[Stage] = Stage.FUSE
    conflicts: ClassVar[frozenset[str]] = frozenset({"in-place"})

    def rules(self, module: Module, function: Function) -> Sequence[Rule]:
        """Both rules."""
        rows = Guard("rows", _rows_stay)
        return (
            Rule(
                "norm_rope",
                _FORWARD,
                ("rms_norm",),
                _emit_forward,
                (rows, in_time(function, _forward_exports)),
                _forward_exports,
            ),
            Rule(
                "norm_rope_grad",
                _BACKWARD,
                ("rope",),
                _emit_backward,
                (rows, Guard("dtype", _one_dtype), in_time(function, _backward_exports)),
                _backward_exports,
            ),
        )
