"""What one rank runs of a node: divided shapes in attributes, and axes that bind dims instead."""

from __future__ import annotations

import pytest
import torch

from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.dims import NamedDim, symbol
from mgraph.ir.graph import Axis, Entry, Fact, Module
from mgraph.ir.local import Division, bound_dims, data_axes, declared_sizes, part
from mgraph.ir.types import DType, Shard, TensorType

B = symbol("B")


def test_axes_that_split_inputs_bind_dims_and_others_divide() -> None:
    builder = FunctionBuilder("f", "test")
    x = builder.param("x", TensorType(DType.F32, (B, 8)).place("dp", Shard(0)))
    module = Module(
        "m",
        mesh=(Axis("dp"), Axis("tp", 4), Axis("pp", 1), Axis("all", of=("dp", "tp"))),
        functions={"f": builder.build([x])},
        entries={"f": Entry("f", "f", ("x",))},
    )
    assert declared_sizes(module) == {"tp": 4, "pp": 1}
    assert bound_dims(module) == {("B", "dp")}
    assert data_axes(module.mesh, bound_dims(module)) == ["dp"]
    division = Division.of(module, {"dp": 2, "tp": 4, "pp": 1})
    assert not division.divides(B, "dp") and division.divides(8, "dp")
    assert division.divides(8, "tp") and not division.divides(8, "pp")


def test_shapes_in_attributes_are_divided_as_the_result_lies() -> None:
    builder = FunctionBuilder("f", "test")
    x = builder.param("x", TensorType(DType.F32, (B, 8, 6)))
    builder.emit("reshape", [x], {"shape": (B, 2, 4, 6)})
    placed = builder.nodes[0].result.tensor.place("dp", Shard(0)).place("tp", Shard(1))
    builder.emit("reshape", [x], {"shape": (B, 2, 4, 6)}, types=[placed])
    whole, split = builder.nodes
    division = Division({"dp": 2, "tp": 2}, frozenset({("B", "dp")}))
    assert division.local_attrs(whole) is whole.attrs
    assert division.local_attrs(split)["shape"] == (B, 1, 4, 6)
    assert Division({}, frozenset()).local_attrs(split) is split.attrs
    assert division.local_type(placed).shape == (B, 1, 4, 6)
    assert division.local_type(placed).placement == placed.placement
    weight = TensorType(DType.F32, (8, 6)).place("tp", Shard(0)).place("dp", Shard(0))
    assert division.local_type(weight).shape == (2, 6)


def test_parts_of_a_tensor() -> None:
    type_ = TensorType(DType.F32, (4, 6)).place("tp", Shard(1)).place("fsdp", Shard(0))
    tensor = torch.arange(24.0).reshape(4, 6)
    found = part(tensor, type_, {"tp": 3, "fsdp": 2}, {"tp": 2, "fsdp": 1})
    assert torch.equal(found, tensor[2:, 4:])


def test_a_multiple_is_divided() -> None:
    mesh = (Axis("tp", 4),)
    length = symbol("S")
    module = Module("m", dims={"S": NamedDim("S")}, mesh=mesh, facts=(Fact("S % tp == 0"),))
    division = Division.of(module, declared_sizes(module))
    whole = TensorType(DType.F32, (2, length, 3)).place("tp", Shard(1))
    assert division.local_type(whole).shape == (2, length / 4, 3)
    builder = FunctionBuilder("f", "test")
    x = builder.param("x", TensorType(DType.F32, (2, length * 3)).place("tp", Shard(1)))
    builder.emit("reshape", [x], {"shape": (2, length, 3)}, types=[whole])
    assert division.local_attrs(builder.nodes[0])["shape"] == (2, length / 4, 3)
    with pytest.raises(ValueError, match="does not divide over tp=4"):
        Division({"tp": 4}, frozenset()).local_type(whole)
