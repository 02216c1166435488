"""Recognise gated linear units.

    %a = aten.silu.default(%gate)          ==>  %y = glu(%gate, %up) {act = "silu"}
    %y = aten.mul.Tensor(%a, %up)

The activations are silu (also written `x * sigmoid(x)`) and gelu in its exact and its tanh form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.graph import Function, Module, Value
from mgraph.ir.pattern import Guard, Match, capture, either, op, where
from mgraph.passes.rewrite import RaisePass, Rule

_GATE = capture("gate")
_APPROXIMATE = where("none or tanh", lambda value, node: value in (None, "none", "tanh"))
_ACTIVATED = either(
    op("aten.silu.default", _GATE),
    op("aten.gelu.default", _GATE, approximate=_APPROXIMATE, name="gelu"),
    op("aten.mul.Tensor", _GATE, op("aten.sigmoid.default", _GATE), commutative=True),
)


def _same_type(match: Match) -> str | None:
    gate, up, y = match["gate"].tensor, match["up"].tensor, match.root.result.tensor
    if (gate.dtype, gate.shape) == (up.dtype, up.shape) == (y.dtype, y.shape):
        return None
    return f"gate {gate}, up {up} and result {y} differ in shape or dtype"


def _emit(builder: FunctionBuilder, match: Match) -> Sequence[Value]:
    act = "silu"
    if "gelu" in match.nodes:
        act = "gelu_tanh" if match.attr("gelu", "approximate") == "tanh" else "gelu_erf"
    return builder.emit("glu", (match["gate"], match["up"]), {"act": act})


_RULE = Rule(
    "glu",
    op("aten.mul.Tensor", _ACTIVATED, capture("up"), commutative=True),
    ("aten.silu.default", "aten.gelu.default", "aten.sigmoid.default"),
    _emit,
    (Guard("type", _same_type),),
)


@dataclass(frozen=True)
class RaiseGlu(RaisePass):
    """Raise gated linear units."""

    name: ClassVar[str] = "raise-glu"

    def rules(self, module: Module, function: Function) -> Sequence[Rule]:
        """The same rule everywhere."""
        return (_RULE,)
