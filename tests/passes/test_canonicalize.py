"""Each normal form, and that the values stay bitwise the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.graph import Module, Node, Value
from mgraph.ir.types import DType, TensorType
from mgraph.ir.verifier import verify
from mgraph.passes.base import Report
from mgraph.passes.canonicalize import Canonicalize
from tests.passes.build import B, S, assert_same_results, f32, i64, module_of, started

Build = Callable[[FunctionBuilder, Value], Value]
SIZES = {B: 3, S: 5}


def one(op: str, **attrs: Any) -> Build:
    return lambda builder, x: builder.one(op, x, **attrs)


def chain(*steps: Build) -> Build:
    def build(builder: FunctionBuilder, x: Value) -> Value:
        for step in steps:
            x = step(builder, x)
        return x

    return build


def canonical(build: Build, *types: TensorType) -> list[Node]:
    """The nodes of the canonical function of `build(x)`; values are compared, and a second run changes nothing."""
    builder = started()
    params = [builder.param(f"x{i}", t) for i, t in enumerate(types)]
    module = module_of(builder.build([build(builder, params[0])]))
    after = Canonicalize().run(module, Report())
    verify(after)
    inputs = {p.name: _random(p.tensor) for p in params}
    assert_same_results(module, after, inputs, {})
    assert Canonicalize().run(after, Report()) is after
    return list(_nodes(after))


def _nodes(module: Module) -> Sequence[Node]:
    return module.functions["forward"].nodes


def _random(type_: TensorType) -> torch.Tensor:
    shape = [SIZES.get(d, d) for d in type_.shape]
    if type_.dtype is DType.I64:
        return torch.randint(-9, 9, shape)
    if type_.dtype is DType.BOOL:
        return torch.rand(shape) > 0.5
    return torch.randn(shape).to(torch.bfloat16 if type_.dtype is DType.BF16 else torch.float32)


CUBE = f32(B, S, 12)
TO = "aten.to.dtype"


@pytest.mark.parametrize(
    ("build", "op", "attrs"),
    [
        (one("aten.view.default", size=(B, S, 3, 4)), "reshape", {"shape": (B, S, 3, 4)}),
        (one("aten.flatten.using_ints", start_dim=1), "reshape", {"shape": (B, 12 * S)}),
        (one("aten.unsqueeze.default", dim=-1), "reshape", {"shape": (B, S, 12, 1)}),
        (
            chain(one("aten.view.default", size=(B * S, 12)), one("aten.view.default", size=(B * S, 2, 6))),
            "reshape",
            {"shape": (B * S, 2, 6)},
        ),
        (one("aten.transpose.int", dim0=-1, dim1=0), "aten.permute.default", {"dims": (2, 1, 0)}),
        (one("aten.mT.default"), "aten.permute.default", {"dims": (0, 2, 1)}),
        (
            chain(one("aten.transpose.int", dim0=0, dim1=1), one("aten.permute.default", dims=(2, 0, -2))),
            "aten.permute.default",
            {"dims": (2, 1, 0)},
        ),
        (one(TO, dtype=DType.BF16), "cast", {"dtype": DType.BF16}),
        (chain(one(TO, dtype=DType.F64), one(TO, dtype=DType.BF16)), "cast", {"dtype": DType.BF16}),
        (one("aten.slice.Tensor", dim=-1, start=-8, end=-2), "aten.slice.Tensor", {"dim": 2, "start": 4, "end": 10}),
        (one("aten.slice.Tensor", dim=2, start=6, end=2**63 - 1), "aten.slice.Tensor", {"dim": 2, "start": 6}),
        (one("aten.slice.Tensor", dim=2, start=0, end=12, step=2), "aten.slice.Tensor", {"dim": 2, "step": 2}),
        (one("aten.narrow.default", dim=2, start=3, length=4), "aten.slice.Tensor", {"dim": 2, "start": 3, "end": 7}),
        (
            chain(one("aten.slice.Tensor", dim=2, start=2), one("aten.slice.Tensor", dim=2, start=1, end=5)),
            "aten.slice.Tensor",
            {"dim": 2, "start": 3, "end": 7},
        ),
        (one("aten.square.default"), "aten.pow.Tensor_Scalar", {"exponent": 2}),
        (
            one("aten.new_ones.default", size=(B, 3), dtype=DType.BOOL),
            "aten.full.default",
            {"size": (B, 3), "fill_value": True, "dtype": DType.BOOL},
        ),
        (
            one("aten.full_like.default", fill_value=-2),
            "aten.full.default",
            {"size": (B, S, 12), "fill_value": -2.0, "dtype": DType.F32},
        ),
    ],
)
def test_normal_forms(build: Build, op: str, attrs: dict[str, Any]) -> None:
    node = canonical(build, CUBE)[-1]
    assert node.op == op
    assert dict(node.attrs) == attrs and repr(dict(node.attrs)) == repr(attrs)
    assert node.operands == () or node.operands[0].name == "x0"


@pytest.mark.parametrize(
    "build",
    [
        one("aten.contiguous.default"),
        one("aten.clone.default"),
        one("aten.alias.default"),
        one(TO, dtype=DType.F32),
        chain(one(TO, dtype=DType.F64), one(TO, dtype=DType.F32)),
        one("aten.expand.default", size=(-1, S, 12)),
        one("aten.slice.Tensor", dim=1, start=0, end=S),
        one("aten.slice.Tensor", dim=1, start=0, end=S + 3),
        one("aten.mul.Tensor", other=1.0),
        one("aten.div.Tensor", other=1),
        one("aten.dropout.default", p=0.0, train=True),
        one("aten.dropout.default", p=0.5, train=False),
        chain(one("aten.transpose.int", dim0=0, dim1=2), one("aten.transpose.int", dim0=2, dim1=0)),
        chain(one("aten.unsqueeze.default", dim=1), one("aten.squeeze.dim", dim=1)),
    ],
)
def test_what_does_nothing_vanishes(build: Build) -> None:
    before = [n.op for n in canonical(build, CUBE)]
    # Of a pair that undoes itself the first stays until dce.
    assert len(before) <= 1


@pytest.mark.parametrize(
    ("build", "type_"),
    [
        (one("aten.add.Tensor", other=0.0), f32(B, S)),  # turns -0.0 into 0.0
        (one("aten.mul.Tensor", other=1.0), i64(B, S)),  # makes floats
        (chain(one(TO, dtype=DType.BF16), one(TO, dtype=DType.F32)), f32(B, S)),  # rounds
        (one("aten.slice.Tensor", dim=1, start=0, end=4), f32(B, S)),  # S may be more
        (one("aten.div.Tensor", other=1, rounding_mode="floor"), f32(B, S)),
    ],
)
def test_what_does_something_stays(build: Build, type_: TensorType) -> None:
    nodes = canonical(build, type_)
    assert nodes[-1].operands


def test_integer_zero_vanishes() -> None:
    assert canonical(one("aten.add.Tensor", other=0), i64(B, S)) == []


def test_a_cast_through_a_narrower_dtype_keeps_the_rounding() -> None:
    nodes = canonical(chain(one(TO, dtype=DType.BF16), one(TO, dtype=DType.F64)), f32(B, S))
    assert [n.attrs["dtype"] for n in nodes] == [DType.BF16, DType.F64]
    assert nodes[1].operands == nodes[0].results


def test_a_slice_that_may_be_cut_off_does_not_compose() -> None:
    """`x[:, 1:][:, :4]` is `x[:, 1:5]` only where S allows: the end is cut off at the extent either way, but past an
    inner end it would reach into the outer tensor."""
    nodes = canonical(
        chain(one("aten.slice.Tensor", dim=1, start=0, end=S - 1), one("aten.slice.Tensor", dim=1, start=0, end=9)),
        f32(B, S),
    )
    assert [n.op for n in nodes] == ["aten.slice.Tensor"] * 2


@pytest.mark.parametrize(
    ("op", "attrs", "starts"),
    [
        ("aten.chunk.default", {"chunks": 3, "dim": -1}, [0, 4, 8]),
        ("aten.chunk.default", {"chunks": 5, "dim": -1}, [0, 3, 6, 9]),
        ("aten.split.Tensor", {"split_size": 5, "dim": 2}, [0, 5, 10]),
        ("aten.split_with_sizes.default", {"split_sizes": (1, 11), "dim": 2}, [0, 1]),
    ],
)
def test_splits_are_slices(op: str, attrs: dict[str, Any], starts: list[int]) -> None:
    builder = started()
    x = builder.param("x", CUBE)
    parts = builder.emit(op, [x], attrs)
    module = module_of(builder.build(parts))
    after = Canonicalize().run(module, Report())
    verify(after)
    assert_same_results(module, after, {"x": torch.randn(3, 5, 12)}, {})
    assert [n.attrs.get("start", 0) for n in _nodes(after)] == starts
    assert {n.op for n in _nodes(after)} == {"aten.slice.Tensor"}
    assert after.functions["forward"].results == parts


def test_more_dims_first() -> None:
    def build(builder: FunctionBuilder, x: Value) -> Value:
        return builder.one("aten.mul.Tensor", builder.params[1], x)

    node = canonical(build, CUBE, f32(12))[-1]
    assert [v.name for v in node.operands] == ["x0", "x1"]


def test_subtraction_keeps_its_order() -> None:
    def build(builder: FunctionBuilder, x: Value) -> Value:
        return builder.one("aten.sub.Tensor", builder.params[1], x)

    assert [v.name for v in canonical(build, CUBE, f32(12))[-1].operands] == ["x1", "x0"]


def test_logic_of_bools() -> None:
    def build(builder: FunctionBuilder, x: Value) -> Value:
        both = builder.one("aten.__and__.Tensor", x, builder.params[1])
        return builder.one("aten.logical_not.default", builder.one("aten.logical_or.default", both, x))

    flags = TensorType(DType.BOOL, (B, S))
    assert [n.op for n in canonical(build, flags, flags)] == [
        "aten.bitwise_and.Tensor",
        "aten.bitwise_or.Tensor",
        "aten.bitwise_not.default",
    ]
