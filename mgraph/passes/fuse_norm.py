"""fuse-norm: a sum and the norm of it in one op, and backward the norm's gradient and the sum that it goes into.

    %s: bf16[B, S, 64] = aten.add.Tensor(%x, %r)                       ==>  %s, %y, %rstd = add_rms_norm(%x, %r, %w)
    %y: bf16[B, S, 64], %rstd: f32[B, S, 1] = rms_norm(%s, %w)                {eps = 1e-05, round = "normed"}

    %dx: bf16[B, S, 64], %dw = rms_norm_grad(%dy, %s, %w, %rstd)       ==>  %t, %dw = add_rms_norm_grad(%dy, %d, %s, %w,
    %t: bf16[B, S, 64] = aten.add.Tensor(%d, %dx)                             %rstd) {eps = 1e-05, round = "normed"}

The sum may have other readers; the gradient `%dx` may not, and is then never rounded by itself. Everything that is
added has one type, placement included, and what the new op makes is not read before all that it reads is there. Where
the sum is made in another function (the norm that begins a layer), there is nothing to fuse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.graph import Function, Module, Value
from mgraph.ir.pattern import ANY, Guard, Match, capture, op
from mgraph.passes.base import Stage
from mgraph.passes.rewrite import RaisePass, Rule

_FORWARD = op(
    "rms_norm",
    op("aten.add.Tensor", capture("x"), capture("residual"), binds="sum"),
    capture("weight"),
    eps=ANY,
    offset=ANY,
    round=ANY,
    name="norm",
)
_BACKWARD = op(
    "aten.add.Tensor",
    op(
        "rms_norm_grad",
        capture("dy"),
        capture("sum"),
        capture("weight"),
        capture("rstd"),
        eps=ANY,
        offset=ANY,
        round=ANY,
        binds="dx",
        name="norm",
    ),
    capture("dsum"),
    commutative=True,
)


def _one_type(*names: str) -> Guard:
    """All values of these names have one type."""

    def check(match: Match) -> str | None:
        first, *rest = (match[name] for name in names)
        for name, value in zip(names[1:], rest, strict=True):
            if value.type != first.type:
                return f"{name} is {value.type}, expected {first.type} like {names[0]}"
        return None

    return Guard("type", check)


def _not_itself(match: Match) -> str | None:
    return "the gradient is added to itself" if match["dsum"] is match["dx"] else None


def _forward_exports(match: Match) -> tuple[Value, ...]:
    return match["sum"], *match.root.results


def _backward_exports(match: Match) -> tuple[Value, ...]:
    return match.root.result, match.nodes["norm"].results[1]


def _emit_forward(builder: FunctionBuilder, match: Match) -> Sequence[Value]:
    return _fused(builder, match, "add_rms_norm", ("x", "residual", "weight"), _forward_exports(match))


def _emit_backward(builder: FunctionBuilder, match: Match) -> Sequence[Value]:
    operands = ("dy", "dsum", "sum", "weight", "rstd")
    return _fused(builder, match, "add_rms_norm_grad", operands, _backward_exports(match))


def _fused(
    builder: FunctionBuilder, match: Match, new: str, operands: Sequence[str], results: Sequence[Value]
) -> Sequence[Value]:
    """The node that makes all of `results`, of the types that they have."""
    attrs, types = match.nodes["norm"].attrs, [value.type for value in results]
    return builder.emit(new, [match[name] for name in operands], attrs, types=types, names=[v.name for v in results])


def in_time(function: Function, exports: Callable[[Match], Sequence[Value]]) -> Guard:
    """Nothing reads what a match exports before all that its replacement reads is there."""
    made = {value: index for index, node in enumerate(function.nodes) for value in node.results}
    users = function.users()

    def check(match: Match) -> str | None:
        exported = exports(match)
        reads = [value for value in match.values.values() if value not in exported and value in made]
        last = max(reads, key=made.__getitem__, default=None)
        for value in exported:
            for reader in users.get(value, ()):
                if last is not None and reader not in match.chain and made[reader.results[0]] <= made[last]:
                    return f"{value!r} is read before {last!r} is made"
        return None

    return Guard("order", check)


@dataclass(frozen=True)
class FuseNorm(RaisePass):
    """Join sums and their RMS norms, forward and backward."""

    name: ClassVar[str] = "fuse-norm"
    stage: ClassVar[Stage] = Stage.FUSE
    conflicts: ClassVar[frozenset[str]] = frozenset({"in-place"})

    def rules(self, module: Module, function: Function) -> Sequence[Rule]:
        """Both rules."""
        return (
            Rule(
                "add_rms_norm",
                _FORWARD,
                ("aten.add.Tensor",),
                _emit_forward,
                (_one_type("sum", "x", "residual"), in_time(function, _forward_exports)),
                _forward_exports,
            ),
            Rule(
                "add_rms_norm_grad",
                _BACKWARD,
                ("rms_norm_grad",),
                _emit_backward,
                (
                    _one_type("dx", "dsum", "dy", "sum"),
                    Guard("itself", _not_itself),
                    in_time(function, _backward_exports),
                ),
                _backward_exports,
            ),
        )
