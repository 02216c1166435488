"""RMS normalisation (Zhang and Sennrich 2019, arXiv:1910.07467), layer normalisation (Ba et al. 2016,
arXiv:1607.06450), and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mgraph.ir.opdef import REQUIRED, GradientRequest, define_op
from mgraph.ir.ops.cost import per_element, traffic
from mgraph.ir.ops.numeric import rounded
from mgraph.ir.torch_bridge import promote

if TYPE_CHECKING:
    from torch import Tensor

    from mgraph.ir.graph import Value

ATTRS = {"eps": REQUIRED, "offset": 0.0, "round": "product"}
"""`round`: `normed` rounds the normalised value to x's dtype before the weight product, `product` only after it."""


def rms_norm(
    x: Tensor, weight: Tensor, *, eps: float, offset: float = 0.0, round: str = "product"
) -> tuple[Tensor, Tensor]:
    """Normalise the last dim: `rstd = 1 / sqrt(mean(x²) + eps)`, `y = x · rstd · (weight + offset)`.

    x [..., n], weight [n] → y [..., n] in x's dtype, rstd [..., 1] in f32. Statistics are at least f32. With
    `round="normed"` the product x · rstd is rounded to x's dtype first, as Llama does; `product` rounds once.
    """
    wide = promote(x)
    rstd = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    normed = wide * rstd
    if round == "normed":
        normed = promote(rounded(normed, x))
    return rounded(normed * (promote(weight) + offset), x), rstd


def rms_norm_grad(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, *, eps: float, offset: float = 0.0, round: str = "product"
) -> tuple[Tensor, Tensor]:
    """Gradient of `rms_norm`: with n = x · rstd and g = dy · (weight + offset),

        dx = rstd · (g - n · mean(g · n)),  dweight = Σ over rows of dy · n

    dy, x [..., n], weight [n], rstd [..., 1] → dx [..., n] in x's dtype, dweight [n] in weight's.
    """
    dx, dweight = rms_norm_wide_gradients(dy, x, weight, rstd, offset, round)
    return rounded(dx, x), rounded(dweight, weight)


def rms_norm_wide_gradients(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, offset: float, round: str
) -> tuple[Tensor, Tensor]:
    """dx and dweight of `rms_norm` before they are rounded."""
    normed = promote(x) * rstd
    grad = promote(dy) * (promote(weight) + offset)
    dx = rstd * (grad - normed * (grad * normed).mean(-1, keepdim=True))
    seen = promote(rounded(normed, x)) if round == "normed" else normed
    return dx, (promote(dy) * seen).reshape(-1, x.shape[-1]).sum(0)


def _gradient(request: GradientRequest) -> Sequence[Value | None]:
    x, weight = request.node.operands
    operands = (request.cotangent, x, weight, request.node.results[1])
    names = ("dx", "dweight")
    dx, dweight = request.builder.emit("rms_norm_grad", operands, request.node.attrs, names=names)
    return dx, dweight if request.needs[1] else None


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float, offset: float = 0.0, round: str = "product"
) -> tuple[Tensor, Tensor, Tensor]:
    """A sum and its `rms_norm`: `sum = x + residual`, rounded, and `y, rstd = rms_norm(sum, weight)`.

    x, residual [..., n] of one dtype, weight [n] → sum and y [..., n] in x's dtype, rstd [..., 1] in f32.
    """
    total = x + residual
    return total, *rms_norm(total, weight, eps=eps, offset=offset, round=round)


def add_rms_norm_grad(
    dy: Tensor,
    dsum: Tensor,
    total: Tensor,
    weight: Tensor,
    rstd: Tensor,
    *,
    eps: float,
    offset: float = 0.0,
    round: str = "product",
) -> tuple[Tensor, Tensor]:
    """Gradient of `add_rms_norm`, from those of y and of the sum: `dx = dsum + rms_norm_grad(dy, sum, weight, rstd)`.

    dy, dsum, sum [..., n], weight [n], rstd [..., 1] → dx [..., n] in sum's dtype, rounded once, and dweight [n] in
    weight's. dx is the gradient of x and of the residual.
    """
    dx, dweight = rms_norm_wide_gradients(dy, total, weight, rstd, offset, round)
    return rounded(promote(dsum) + dx, total), rounded(dweight, weight)


def _add_gradient(request: GradientRequest) -> Sequence[Value | None]:
    total, _, rstd = request.node.results
    dx, dy = request.cotangents[:2]
    dweight = None
    if dy is not None:
        operands = (total, request.node.operands[2], rstd)
        op, cotangents = ("rms_norm_grad", (dy,)) if dx is None else ("add_rms_norm_grad", (dy, dx))
        made = request.builder.emit(op, (*cotangents, *operands), request.node.attrs, names=("dx", "dweight"))
        dx, dweight = made[0], made[1] if request.needs[2] else None
    return dx if request.needs[0] else None, dx if request.needs[1] else None, dweight


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Centre and normalise the last dim: `rstd = 1 / sqrt(mean((x - mean)²) + eps)`, `y = (x - mean) · rstd · weight +
    bias`.

    x [..., n], weight, bias [n] → y [..., n] in x's dtype, mean and rstd [..., 1] in f32. Computed in at least f32,
    rounded once.
    """
    wide = promote(x)
    mean = wide.mean(-1, keepdim=True)
    centred = wide - mean
    rstd = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    return rounded(centred * rstd * promote(weight) + promote(bias), x), mean, rstd


def layer_norm_grad(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of `layer_norm`: with n = (x - mean) · rstd and g = dy · weight,

        dx = rstd · (g - mean(g) - n · mean(g · n)),  dweight = Σ over rows of dy · n,  dbias = Σ over rows of dy

    dy, x [..., n], weight, bias [n], mean, rstd [..., 1] → dx in x's dtype, dweight and dbias [n] in their own.
    """
    normed = (promote(x) - mean) * rstd
    grad = promote(dy) * promote(weight)
    dx = rstd * (grad - grad.mean(-1, keepdim=True) - normed * (grad * normed).mean(-1, keepdim=True))
    dweight = (promote(dy) * normed).reshape(-1, x.shape[-1]).sum(0)
    dbias = promote(dy).reshape(-1, x.shape[-1]).sum(0)
    return rounded(dx, x), rounded(dweight, weight), rounded(dbias, bias)


def _layer_norm_gradient(request: GradientRequest) -> Sequence[Value | None]:
    x, weight, bias = request.node.operands
    operands = (request.cotangent, x, weight, bias, *request.node.results[1:])
    made = request.builder.emit("layer_norm_grad", operands, {}, names=("dx", "dweight", "dbias"))
    return [value if needed else None for value, needed in zip(made, request.needs, strict=True)]


define_op(
    "layer_norm",
    layer_norm,
    signature="... n^, n^, n^ -> ... n, ... 1:f32, ... 1:f32",
    attrs={"eps": REQUIRED},
    gradient=_layer_norm_gradient,
    flops=per_element(8),
    bytes=traffic,
    compute_dtype="f32",
)
define_op(
    "layer_norm_grad",
    layer_norm_grad,
    signature="... n^, ... n^, n^, n^, ... 1, ... 1 -> ... n, n, n",
    infer=lambda types, attrs: (types[1], types[2], types[3]),
    flops=per_element(14),
    bytes=traffic,
    compute_dtype="f32",
)
define_op(
    "rms_norm",
    rms_norm,
    signature="... n^, n^ -> ... n, ... 1:f32",
    attrs=ATTRS,
    gradient=_gradient,
    flops=per_element(5),
    bytes=traffic,
    compute_dtype="f32",
)
define_op(
    "rms_norm_grad",
    rms_norm_grad,
    signature="... n^, ... n^, n^, ... 1 -> ... n, n",
    infer=lambda types, attrs: (types[1], types[2]),
    attrs=ATTRS,
    flops=per_element(11),
    bytes=traffic,
    compute_dtype="f32",
)
define_op(
    "add_rms_norm",
    add_rms_norm,
    signature="... n^, ... n^, n^ -> ... n, ... n, ... 1:f32",
    attrs=ATTRS,
    gradient=_add_gradient,
    flops=per_element(6),
    bytes=traffic,
    compute_dtype="f32",
)
define_op(
    "add_rms_norm_grad",
    add_rms_norm_grad,
    signature="... n^, ... n^, ... n^, n^, ... 1 -> ... n, n",
    infer=lambda types, attrs: (types[2], types[3]),
    attrs=ATTRS,
    flops=per_element(12),
    bytes=traffic,
    compute_dtype="f32",
)
