"""Gated linear units (Shazeer 2020, arXiv:2002.05202): SwiGLU and GeGLU, and their gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mgraph.ir.opdef import REQUIRED, GradientRequest, define_op
from mgraph.ir.ops.cost import per_element, traffic
from mgraph.ir.ops.numeric import rounded
from mgraph.ir.torch_bridge import promote

if TYPE_CHECKING:
    from torch import Tensor

    from mgraph.ir.graph import Value

ACTIVATIONS = ("silu", "gelu_tanh", "gelu_erf")


def _activate(gate: Tensor, act: str) -> Tensor:
    from torch.nn import functional

    assert act in ACTIVATIONS, f"unknown activation {act!r}"
    if act == "silu":
        return functional.silu(gate)
    return functional.gelu(gate, approximate="tanh" if act == "gelu_tanh" else "none")


def _derivative(gate: Tensor, act: str) -> Any:
    import torch

    assert act in ACTIVATIONS, f"unknown activation {act!r}"
    one = torch.ones_like(gate)
    if act == "silu":
        return torch.ops.aten.silu_backward.default(one, gate)
    return torch.ops.aten.gelu_backward.default(one, gate, approximate="tanh" if act == "gelu_tanh" else "none")


def glu(gate: Tensor, up: Tensor, *, act: str) -> Tensor:
    """`y = act(gate) · up`, computed in at least f32 and rounded once. gate, up [..., f] → y [..., f].

    `act`: `silu` (SwiGLU), `gelu_tanh` (GeGLU with the tanh form), `gelu_erf` (the exact form).
    """
    return rounded(_activate(promote(gate), act) * promote(up), gate)


def glu_grad(dy: Tensor, gate: Tensor, up: Tensor, *, act: str) -> tuple[Tensor, Tensor]:
    """Gradient of `glu`: `dgate = dy · up · act'(gate)`, `dup = dy · act(gate)`. All [..., f]."""
    grad, wide = promote(dy), promote(gate)
    dgate = grad * promote(up) * _derivative(wide, act)
    return rounded(dgate, gate), rounded(grad * _activate(wide, act), up)


def _gradient(request: GradientRequest) -> Sequence[Value | None]:
    operands = (request.cotangent, *request.node.operands)
    return request.builder.emit("glu_grad", operands, request.node.attrs, names=("dgate", "dup"))


define_op(
    "glu",
    glu,
    signature="... f, ... f -> ... f",
    attrs={"act": REQUIRED},
    gradient=_gradient,
    flops=per_element(6),
    bytes=traffic,
    compute_dtype="f32",
)
define_op(
    "glu_grad",
    glu_grad,
    signature="... f, ... f, ... f -> ... f, ... f",
    attrs={"act": REQUIRED},
    flops=per_element(12),
    bytes=traffic,
    compute_dtype="f32",
)
