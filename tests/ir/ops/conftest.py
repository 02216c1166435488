"""Runs one op and its gradient rule through the interpreter, against a reference and its autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.graph import Module
from mgraph.ir.interpreter import run_function
from mgraph.ir.opdef import GradientRequest, op_def
from mgraph.ir.torch_bridge import from_torch_dtype
from mgraph.ir.types import TensorType

Reference = Callable[..., Tensor | tuple[Tensor, ...]]


def _type(tensor: Tensor) -> TensorType:
    return TensorType(from_torch_dtype(tensor.dtype), tuple(tensor.shape))


def run_with_gradient(
    op: str, operands: Sequence[Tensor], attrs: Mapping[str, Any], cotangent: Tensor, *, lifted: bool
) -> tuple[tuple[Tensor, ...], list[Tensor | None]]:
    """The op's results, and the gradient its rule emits per operand for a cotangent of the first result."""
    builder = FunctionBuilder("test", "test")
    values = [builder.param(f"x{i}", _type(t)) for i, t in enumerate(operands)]
    grad = builder.param("cotangent", _type(cotangent))
    results = builder.emit(op, values, attrs)
    node = builder.nodes[-1]
    needs = tuple(t.requires_grad for t in operands)
    rule = op_def(op).gradient
    assert rule is not None, f"{op} has no gradient rule"
    cotangents = (grad, *(None for _ in results[1:]))
    grads = rule(GradientRequest(builder, node, cotangents, needs))
    assert len(grads) == len(operands)
    kept = [g for g in grads if g is not None]
    function = builder.build([*results, *kept])
    given = [t.detach() for t in (*operands, cotangent)]
    outputs = run_function(Module("test", functions={"test": function}), function, given, lifted=lifted)
    for value, tensor in zip(function.results, outputs, strict=True):
        assert value.tensor.shape == tuple(tensor.shape), f"{value!r}: {value.type} but {tuple(tensor.shape)}"
        assert lifted or value.tensor.dtype == from_torch_dtype(tensor.dtype), f"{value!r}: {value.type}"
    tail = iter(outputs[len(results) :])
    return outputs[: len(results)], [None if g is None else next(tail) for g in grads]


Check = Callable[..., tuple[Tensor, ...]]


@pytest.fixture
def check_op() -> Check:
    """`check_op(op, operands, attrs, reference)`: values and gradients in float64 within 1e-11 of the reference's.

    `reference(*operands)` is plain torch; operands that require grad get their gradient compared.
    Gives the op's results.
    """

    def check(
        op: str, operands: Sequence[Tensor], attrs: Mapping[str, Any], reference: Reference
    ) -> tuple[Tensor, ...]:
        wide = [t.detach().double() if t.is_floating_point() else t for t in operands]
        for tensor, like in zip(wide, operands, strict=True):
            tensor.requires_grad_(like.requires_grad)
        made = reference(*wide)
        expected = made if isinstance(made, tuple) else (made,)
        cotangent = torch.randn_like(expected[0])
        results, grads = run_with_gradient(op, wide, attrs, cotangent, lifted=True)
        for ours, theirs in zip(results, expected, strict=False):
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-11, atol=1e-11)
        wanted = [t for t in wide if t.requires_grad]
        reference_grads = iter(torch.autograd.grad(expected[0], wanted, cotangent) if wanted else ())
        for grad, tensor in zip(grads, wide, strict=True):
            if tensor.requires_grad:
                assert grad is not None
                torch.testing.assert_close(grad, next(reference_grads), rtol=1e-11, atol=1e-11)
        return results

    return check


@pytest.fixture
def run_op() -> Callable[..., tuple[tuple[Tensor, ...], list[Tensor | None]]]:
    """`run_op(op, operands, attrs, cotangent)`: results and gradients in the operands' own dtypes."""

    def run(op: str, operands: Sequence[Tensor], attrs: Mapping[str, Any], cotangent: Tensor) -> Any:
        return run_with_gradient(op, operands, attrs, cotangent, lifted=False)

    return run
