"""Folding of constants, and what stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.graph import Module, Node, Value
from mgraph.ir.types import DType, TensorType
from mgraph.ir.verifier import verify
from mgraph.passes.pipeline import run_pipeline
from tests.passes.build import B, S, assert_same_results, f32, module_of, started


def full(builder: FunctionBuilder, value: Any, *shape: Any, dtype: DType = DType.F32) -> Value:
    return builder.one("aten.full.default", size=shape, fill_value=value, dtype=dtype)


def folded(build: Callable[[FunctionBuilder, Value], Value], x: torch.Tensor, type_: TensorType) -> list[Node]:
    """The nodes after folding and dce; values are compared with those before."""
    builder = started()
    module = module_of(builder.build([build(builder, builder.param("x", type_))]))
    after: Module = run_pipeline(module, "canonicalize,constant-fold,dce")[0]
    verify(after)
    assert_same_results(module, after, {"x": x}, {})
    return list(after.functions["forward"].nodes)


def test_scalar_arithmetic_becomes_an_attribute() -> None:
    def build(builder: FunctionBuilder, x: Value) -> Value:
        half = builder.one("aten.div.Tensor", full(builder, 1.0), other=3)
        return builder.one("aten.mul.Tensor", x, builder.one("aten.sqrt.default", half))

    (node,) = folded(build, torch.randn(3, 5), f32(B, S))
    assert node.op == "aten.mul.Tensor" and len(node.operands) == 1
    assert node.attrs["other"] == (torch.ones(()) / 3).sqrt().item()


def test_tensors_become_one_constant() -> None:
    def build(builder: FunctionBuilder, x: Value) -> Value:
        a, b = full(builder, 2.0, 2), full(builder, 0.1, 3)
        both = builder.emit("aten.cat.default", [a, b], {"args": ("tensors.0", "tensors.1")})[0]
        return builder.one("aten.add.Tensor", x, builder.one("aten.exp.default", both))

    constant, add = folded(build, torch.randn(3, 5), f32(B, 5))
    assert constant.op == "constant" and add.operands[1] is constant.result
    values: Any = constant.attrs["values"]
    assert torch.equal(torch.tensor(values), torch.tensor([2.0] * 2 + [0.1] * 3).exp())


def test_a_constant_of_another_dtype_is_no_attribute() -> None:
    def build(builder: FunctionBuilder, x: Value) -> Value:
        return builder.one("aten.mul.Tensor", x, full(builder, 0.1, dtype=DType.F64))

    assert len(folded(build, torch.randn(3, 5), f32(B, S))[-1].operands) == 2


@pytest.mark.parametrize(
    ("op", "fill", "stays"), [("and", True, 0), ("or", False, 0), ("and", False, 2), ("or", True, 2)]
)
def test_neutral_masks_vanish(op: str, fill: bool, stays: int) -> None:
    def build(builder: FunctionBuilder, x: Value) -> Value:
        return builder.one(f"aten.bitwise_{op}.Tensor", full(builder, fill, S, dtype=DType.BOOL), x)

    assert len(folded(build, torch.rand(3, 5) > 0.5, TensorType(DType.BOOL, (B, S)))) == stays


def test_a_neutral_mask_that_widens_stays() -> None:
    def build(builder: FunctionBuilder, x: Value) -> Value:
        return builder.one("aten.bitwise_and.Tensor", full(builder, True, B, S, dtype=DType.BOOL), x)

    builder = started()
    x, y = builder.param("x", TensorType(DType.BOOL, (S,))), builder.param("y", f32(B))
    module = module_of(builder.build([build(builder, x), y]))
    after, _ = run_pipeline(module, "canonicalize,constant-fold")
    assert [n.op for n in after.functions["forward"].nodes][-1] == "aten.bitwise_and.Tensor"
    assert_same_results(module, after, {"x": torch.rand(5) > 0.5, "y": torch.randn(3)}, {})


def test_large_and_unknown_extents_stay() -> None:
    def build(builder: FunctionBuilder, x: Value) -> Value:
        large = builder.one("aten.exp.default", full(builder, 1.0, 257))
        return builder.one("aten.add.Tensor", x, builder.one("aten.sum.default", large))

    assert [n.op for n in folded(build, torch.randn(3, 5), f32(B, S))][:2] == ["aten.full.default", "aten.exp.default"]


def test_positions_and_triangles_stay_readable() -> None:
    def build(builder: FunctionBuilder, x: Value) -> Value:
        mask = builder.one("aten.tril.default", full(builder, 1.0, 5, 5))
        place = builder.one("aten.arange.default", end=5)
        return builder.one("aten.add.Tensor", builder.one("aten.mul.Tensor", x, place), mask)

    ops = [n.op for n in folded(build, torch.randn(5, 5), f32(5, 5))]
    assert "aten.tril.default" in ops and "aten.arange.default" in ops
