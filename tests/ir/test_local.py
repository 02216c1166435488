"""What one rank runs of a node: divided shapes in attributes, and axes that bind dims instead."""

from __future__ import annotations

import torch

from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.dims import symbol
from mgraph.ir.graph import Axis, Entry, Module
from mgraph.ir.local import declared_sizes, dividing_axes, local_attrs, local_type, part
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
    assert dividing_axes(module, {"dp": 2, "tp": 4, "pp": 1}) == {"tp": 4}


def test_shapes_in_attributes_are_divided_as_the_result_lies() -> None:
    builder = FunctionBuilder("f", "test")
    x = builder.param("x", TensorType(DType.F32, (B, 8, 6)))
    builder.emit("reshape", [x], {"shape": (B, 2, 4, 6)})
    placed = builder.nodes[0].result.tensor.place("dp", Shard(0)).place("tp", Shard(1))
    builder.emit("reshape", [x], {"shape": (B, 2, 4, 6)}, types=[placed])
    whole, split = builder.nodes
    assert local_attrs(whole, {"tp": 2}) is whole.attrs
    assert local_attrs(split, {"tp": 2})["shape"] == (B, 1, 4, 6)
    assert local_attrs(split, {}) is split.attrs
    assert local_type(placed, {"tp": 2}).shape == (B, 1, 4, 6)
    assert local_type(placed, {"tp": 2}).placement == placed.placement


def test_parts_of_a_tensor() -> None:
    type_ = TensorType(DType.F32, (4, 6)).place("tp", Shard(1)).place("fsdp", Shard(0))
    tensor = torch.arange(24.0).reshape(4, 6)
    found = part(tensor, type_, {"tp": 3, "fsdp": 2}, {"tp": 2, "fsdp": 1})
    assert torch.equal(found, tensor[2:, 4:])
