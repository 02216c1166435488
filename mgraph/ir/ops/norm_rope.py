"""RMS normalisation of heads and rotary embedding of what it gives, in one: QK-norm (Dehghani et al. 2023,
arXiv:2302.05442, with RMS norms as of Qwen3 and Gemma 3) before RoPE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mgraph.ir.opdef import REQUIRED, GradientRequest, define_op, op_def
from mgraph.ir.ops.cost import per_element, traffic
from mgraph.ir.ops.norm import rms_norm, rms_norm_wide_gradients
from mgraph.ir.ops.numeric import rounded
from mgraph.ir.ops.rope import rope
from mgraph.ir.torch_bridge import promote
from mgraph.ir.types import DType, TensorType

if TYPE_CHECKING:
    from torch import Tensor

    from mgraph.ir.graph import Value

ATTRS = {"eps": REQUIRED, "offset": 0.0, "round": "product", "style": "half"}
"""Those of `rms_norm`, and the style of `rope`."""


def norm_rope(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    eps: float,
    offset: float = 0.0,
    round: str = "product",
    style: str = "half",
) -> tuple[Tensor, Tensor]:
    """`rope` of `rms_norm`: `n, rstd = rms_norm(x, weight)`, rounded to x's dtype, and `y = rope(n, cos, sin)`.

    x [..., d], weight [d], cos and sin [..., d] or [..., d/2] → y [..., d] in x's dtype, rstd [..., 1] in f32.
    """
    normed, rstd = rms_norm(x, weight, eps=eps, offset=offset, round=round)
    return rope(normed, cos, sin, style=style), rstd


def norm_rope_grad(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    rstd: Tensor,
    *,
    eps: float,
    offset: float = 0.0,
    round: str = "product",
    style: str = "half",
) -> tuple[Tensor, Tensor]:
    """Gradients of `norm_rope` for x and weight: those of `rms_norm` for the cotangent `rope(dy, inverse)`.

    dy, x [..., d], weight [d], rstd [..., 1] → dx [..., d] in x's dtype, dweight [d] in weight's. In f32 (at least),
    rounded at the end.
    """
    turned = rope(promote(dy), cos, sin, style=style, inverse=True)
    dx, dweight = rms_norm_wide_gradients(turned, x, weight, rstd, offset, round)
    return rounded(dx, x), rounded(dweight, weight)


def _infer(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    x, weight, cos, sin = types
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"norm_rope: weight is {weight}, not one number for each of the last dim of {x}")
    infer = op_def("rope").infer
    assert infer is not None
    (y,) = infer((x, cos, sin), {"style": attrs.get("style", "half")})
    assert isinstance(y, TensorType)
    return y, TensorType(DType.F32, (*x.shape[:-1], 1))


def _gradient(request: GradientRequest) -> Sequence[Value | None]:
    assert not any(request.needs[2:]), "norm_rope gives its tables no gradient"
    operands = (request.cotangent, *request.node.operands, request.node.results[1])
    dx, dweight = request.builder.emit("norm_rope_grad", operands, request.node.attrs, names=("dx", "dweight"))
    return dx, dweight if request.needs[1] else None, None, None


define_op(
    "norm_rope",
    norm_rope,
    infer=_infer,
    attrs=ATTRS,
    gradient=_gradient,
    flops=per_element(8),
    bytes=traffic,
    compute_dtype="f32",
)
define_op(
    "norm_rope_grad",
    norm_rope_grad,
    infer=lambda types, attrs: (types[1], types[2]),
    attrs=ATTRS,
    flops=per_element(14),
    bytes=traffic,
    compute_dtype="f32",
)
