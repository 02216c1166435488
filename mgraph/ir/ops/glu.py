"""Gated linear units (Shazeer 2020, arXiv:2002.05202) and the squared ReLU, with their gradients.

Gate and up are operands of their own: packed and interleaved projections are slices outside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mgraph.ir.opdef import REQUIRED, GradientRequest, define_op
from mgraph.ir.ops.cost import per_element, traffic
from mgraph.ir.ops.numeric import rounded
from mgraph.ir.torch_bridge import promote

if TYPE_CHECKING:
    from torch import Tensor

    from mgraph.ir.graph import Value

ACTIVATIONS = ("silu", "gelu_tanh", "gelu_erf", "quick_gelu")
GLU_ATTRS: Mapping[str, Any] = {"act": REQUIRED, "alpha": 1.702, "limit": 0.0, "offset": 0.0}


def _activate(gate: Tensor, act: str, alpha: float) -> Tensor:
    from torch.nn import functional

    assert act in ACTIVATIONS, f"unknown activation {act!r}"
    if act == "silu":
        return functional.silu(gate)
    if act == "quick_gelu":
        return gate * (alpha * gate).sigmoid()
    return functional.gelu(gate, approximate="tanh" if act == "gelu_tanh" else "none")


def _derivative(gate: Tensor, act: str, alpha: float) -> Any:
    import torch

    assert act in ACTIVATIONS, f"unknown activation {act!r}"
    one = torch.ones_like(gate)
    if act == "silu":
        return torch.ops.aten.silu_backward.default(one, gate)
    if act == "quick_gelu":  # alpha times it is the silu of alpha times its argument
        return torch.ops.aten.silu_backward.default(one, alpha * gate)
    return torch.ops.aten.gelu_backward.default(one, gate, approximate="tanh" if act == "gelu_tanh" else "none")


def _clamped(gate: Tensor, up: Tensor, limit: float) -> tuple[Any, Any]:
    """Both operands in at least f32, within the limit if there is one (0: none)."""
    wide_gate, wide_up = promote(gate), promote(up)
    return (wide_gate.clamp(max=limit), wide_up.clamp(-limit, limit)) if limit else (wide_gate, wide_up)


def glu(
    gate: Tensor,
    up: Tensor,
    *,
    act: str,
    alpha: float = 1.702,
    limit: float = 0.0,
    offset: float = 0.0,
    spaced: bool = False,
) -> Tensor:
    """`y = act(gate) · (up + offset)`, computed in at least f32 and rounded once. gate, up [..., f] → y [..., f].

    `act`: `silu` (SwiGLU), `gelu_tanh` (GeGLU with the tanh form), `gelu_erf` (the exact form), `quick_gelu`
    (x · sigmoid(`alpha` · x)). With a `limit` > 0, gate is first cut to at most that and up to ±limit (gpt-oss).
    `spaced` says that gate and up are columns with others between them, which changes no number.
    """
    wide_gate, wide_up = _clamped(gate, up, limit)
    return rounded(_activate(wide_gate, act, alpha) * (wide_up + offset), gate)


def glu_grad(
    dy: Tensor,
    gate: Tensor,
    up: Tensor,
    *,
    act: str,
    alpha: float = 1.702,
    limit: float = 0.0,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Gradient of `glu`: `dgate = dy · (up + offset) · act'(gate)`, `dup = dy · act(gate)`. All [..., f].

    Past the limit both are 0, at the limit as inside.
    """
    grad, (wide_gate, wide_up) = promote(dy), _clamped(gate, up, limit)
    dgate = grad * (wide_up + offset) * _derivative(wide_gate, act, alpha)
    dup = grad * _activate(wide_gate, act, alpha)
    if limit:
        dgate, dup = dgate * (gate <= limit), dup * (up.abs() <= limit)
    return rounded(dgate, gate), rounded(dup, up)


def squared_relu(x: Tensor) -> Tensor:
    """`y = max(x, 0)²`, computed in at least f32 and rounded once: an activation without a gate. x, y of one shape."""
    return rounded(promote(x).relu().square(), x)


def squared_relu_grad(dy: Tensor, x: Tensor) -> Tensor:
    """Gradient of `squared_relu`: `dx = 2 · dy · max(x, 0)`."""
    return rounded(2 * promote(dy) * promote(x).relu(), x)


def _gradient(request: GradientRequest) -> Sequence[Value | None]:
    operands = (request.cotangent, *request.node.operands)
    attrs = {name: value for name, value in request.node.attrs.items() if name != "spaced"}
    return request.builder.emit("glu_grad", operands, attrs, names=("dgate", "dup"))


define_op(
    "glu",
    glu,
    signature="... f, ... f -> ... f",
    attrs={**GLU_ATTRS, "spaced": False},
    gradient=_gradient,
    flops=per_element(6),
    bytes=traffic,
    compute_dtype="f32",
)
define_op(
    "glu_grad",
    glu_grad,
    signature="... f, ... f, ... f -> ... f, ... f",
    attrs=GLU_ATTRS,
    flops=per_element(12),
    bytes=traffic,
    compute_dtype="f32",
)
define_op(
    "squared_relu",
    squared_relu,
    signature="... -> ...",
    gradient=lambda r: r.builder.emit("squared_relu_grad", (r.cotangent, *r.node.operands), names=("dx",)),
    flops=per_element(2),
    bytes=traffic,
    compute_dtype="f32",
)
define_op(
    "squared_relu_grad",
    squared_relu_grad,
    signature="..., ... -> ...",
    flops=per_element(3),
    bytes=traffic,
    compute_dtype="f32",
)
