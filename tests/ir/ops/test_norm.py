"""rms_norm against torch's own and the written-out formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.graph import Module
from mgraph.ir.interpreter import run_function
from mgraph.ir.opdef import GradientRequest, op_def
from mgraph.ir.types import DType, TensorType


@pytest.mark.parametrize("shape", [(1,), (3, 7), (2, 3, 5, 16), (0, 4)])
@pytest.mark.parametrize("round_", ["normed", "product"])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_values_and_gradient(check_op: Any, shape: tuple[int, ...], round_: str, offset: float) -> None:
    x = torch.randn(shape, requires_grad=True)
    weight = torch.randn(shape[-1], requires_grad=True)

    def reference(x: Tensor, weight: Tensor) -> Tensor:
        return torch.rms_norm(x, x.shape[-1:], weight + offset, 1e-5)

    _, rstd = check_op("rms_norm", (x, weight), {"eps": 1e-5, "offset": offset, "round": round_}, reference)
    assert rstd.shape == (*shape[:-1], 1)


@pytest.mark.parametrize("round_", ["normed", "product"])
def test_rounding_points(run_op: Any, round_: str) -> None:
    x, weight = torch.randn(9, 33).bfloat16(), torch.randn(33).bfloat16()
    (y, rstd), _ = run_op("rms_norm", (x, weight), {"eps": 1e-6, "round": round_}, torch.ones(9, 33).bfloat16())
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    expected = weight * normed.bfloat16() if round_ == "normed" else (weight.float() * normed).bfloat16()
    assert torch.equal(y, expected)
    assert rstd.dtype == torch.float32


@pytest.mark.parametrize("shape", [(1,), (3, 7), (2, 3, 5, 16), (0, 4)])
def test_layer_norm(check_op: Any, shape: tuple[int, ...]) -> None:
    x, weight, bias = (torch.randn(s, requires_grad=True) for s in (shape, shape[-1:], shape[-1:]))

    def reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)

    _, mean, rstd = check_op("layer_norm", (x, weight, bias), {"eps": 1e-5}, reference)
    assert mean.shape == rstd.shape == (*shape[:-1], 1)


@pytest.mark.parametrize("shape", [(1,), (3, 7), (2, 3, 5, 16), (0, 4)])
@pytest.mark.parametrize(("round_", "offset"), [("normed", 0.0), ("product", 1.0)])
@pytest.mark.parametrize("of", ["sum", "y", "both"])
def test_add_rms_norm(shape: tuple[int, ...], round_: str, offset: float, of: str) -> None:
    """Values, and the gradients for cotangents of the sum, of its norm, and of both, against torch's autograd."""
    x, residual = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(shape[-1], dtype=torch.float64, requires_grad=True)
    total = x + residual
    y = torch.rms_norm(total, shape[-1:], weight + offset, 1e-5)
    cotangents = [torch.randn_like(y) if of in (name, "both") else None for name in ("sum", "y")]
    loss = sum((t * c).sum() for t, c in zip((total, y), cotangents, strict=True) if c is not None)
    assert isinstance(loss, Tensor)
    want = torch.autograd.grad(loss, [x, residual, weight], allow_unused=True)
    attrs = {"eps": 1e-5, "offset": offset, "round": round_}
    builder = FunctionBuilder("test", "test")
    given = [t.detach() for t in (x, residual, weight)]
    values = [builder.param(n, TensorType(DType.F64, tuple(t.shape))) for n, t in zip("xrw", given, strict=True)]
    results = builder.emit("add_rms_norm", values, attrs)
    seeds = [None if c is None else builder.param("seed", values[0].type) for c in cotangents]
    rule = op_def("add_rms_norm").gradient
    assert rule is not None
    grads = rule(GradientRequest(builder, builder.nodes[-1], (*seeds, None), (True, True, True)))
    function = builder.build([*results[:2], *(g for g in grads if g is not None)])
    given += [c for c in cotangents if c is not None]
    made = run_function(Module("test", functions={"test": function}), function, given, lifted=True)
    expected = [total.detach(), y.detach(), *(g for g in want if g is not None)]
    for ours, theirs in zip(made, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


def test_the_sum_is_rounded_before_it_is_normalised() -> None:
    """In bf16 it is bit for bit the sum and then its norm; backward dx is rounded once."""
    x, residual, weight, dy, dsum = (torch.randn(s).bfloat16() for s in ((9, 33), (9, 33), (33,), (9, 33), (9, 33)))
    attrs = {"eps": 1e-6, "round": "normed"}
    total, y, rstd = op_def("add_rms_norm").body(x, residual, weight, **attrs)
    assert torch.equal(total, x + residual)
    for ours, theirs in zip((y, rstd), op_def("rms_norm").body(total, weight, **attrs), strict=True):
        assert torch.equal(ours, theirs)
    dx, dweight = op_def("add_rms_norm_grad").body(dy, dsum, total, weight, rstd, **attrs)
    apart, dweight_apart = op_def("rms_norm_grad").body(dy, total, weight, rstd, **attrs)
    assert torch.equal(dweight, dweight_apart) and dx.dtype is torch.bfloat16
    exact, _ = op_def("rms_norm_grad").body(*(t.double() for t in (dy, total, weight, rstd)), **attrs)
    exact = exact + dsum.double()
    assert (dx - exact).norm() < 0.9 * (apart + dsum - exact).norm()
