"""Recognise gated linear units.

    %a = aten.silu.default(%gate)          ==>  %y = glu(%gate, %up) {act = "silu"}
    %y = aten.mul.Tensor(%a, %up)

The activations are silu (also written `x * sigmoid(x)`), gelu in its exact and its tanh form, and the quick form
`x * sigmoid(1.702 * x)`. Gate and up may be cut to a limit before, and up may have an offset: `act(gate) * (up + 1)`.

    %a = aten.relu.default(%x)             ==>  %y = squared_relu(%x)
    %y = aten.pow.Tensor_Scalar(%a) {exponent = 2}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.graph import Function, Module, Value
from mgraph.ir.pattern import NUMBER, Guard, Match, capture, either, op, where
from mgraph.passes.rewrite import RaisePass, Rule

_ADD, _MUL = ("aten.add.Tensor", "aten.add.Scalar"), ("aten.mul.Tensor", "aten.mul.Scalar")
_GATE = either(op("aten.clamp.default", capture("gate"), max=NUMBER, name="gate_limit"), capture("gate"))
_CUT_UP = either(op("aten.clamp.default", capture("up"), min=NUMBER, max=NUMBER, name="up_limit"), capture("up"))
_UP = either(op(_ADD, _CUT_UP, other=NUMBER, name="offset"), _CUT_UP)
_APPROXIMATE = where("none or tanh", lambda value, node: value in (None, "none", "tanh"))
_SCALED = op(_MUL, _GATE, other=NUMBER, name="alpha")
_ACTIVATED = either(
    op("aten.silu.default", _GATE),
    op("aten.gelu.default", _GATE, approximate=_APPROXIMATE, name="gelu"),
    op("aten.mul.Tensor", _GATE, op("aten.sigmoid.default", either(_SCALED, _GATE)), commutative=True),
)


def _limits(match: Match) -> str | None:
    upper, lower = match.attr("up_limit", "max"), match.attr("up_limit", "min")
    gate = match.attr("gate_limit", "max")
    if gate is None and upper is None:
        return None
    if gate is None or upper is None or not gate == upper == -lower > 0:
        return f"gate is cut at {gate} and up at {lower} and {upper}, expected one limit"
    return None


def _same_type(match: Match) -> str | None:
    gate, up, y = match["gate"].tensor, match["up"].tensor, match.root.result.tensor
    if (gate.dtype, gate.shape) == (up.dtype, up.shape) == (y.dtype, y.shape):
        return None
    return f"gate {gate}, up {up} and result {y} differ in shape or dtype"


def _emit(builder: FunctionBuilder, match: Match) -> Sequence[Value]:
    act = "quick_gelu" if "alpha" in match.nodes else "silu"
    if "gelu" in match.nodes:
        act = "gelu_tanh" if match.attr("gelu", "approximate") == "tanh" else "gelu_erf"
    attrs: dict[str, Any] = {"act": act}
    for name, node, attr in (("alpha", "alpha", "other"), ("limit", "up_limit", "max"), ("offset", "offset", "other")):
        if node in match.nodes:
            attrs[name] = float(match.attr(node, attr))
    return builder.emit("glu", (match["gate"], match["up"]), attrs)


def _emit_squared(builder: FunctionBuilder, match: Match) -> Sequence[Value]:
    return builder.emit("squared_relu", (match["x"],))


_GLU = Rule(
    "glu",
    op("aten.mul.Tensor", _ACTIVATED, _UP, commutative=True),
    ("aten.silu.default", "aten.gelu.default", "aten.sigmoid.default"),
    _emit,
    (Guard("type", _same_type), Guard("limit", _limits)),
)
_SQUARED_RELU = Rule(
    "squared_relu",
    op("aten.pow.Tensor_Scalar", op("aten.relu.default", capture("x")), exponent=2),
    ("aten.relu.default",),
    _emit_squared,
)


@dataclass(frozen=True)
class RaiseGlu(RaisePass):
    """Raise gated linear units and squared ReLU."""

    name: ClassVar[str] = "raise-glu"

    def rules(self, module: Module, function: Function) -> Sequence[Rule]:
        """The same rules everywhere."""
        return (_GLU, _SQUARED_RELU)
