"""What one rank runs of a node: attributes speak of the whole tensor, as types do, and a rank holds its part.

An axis over which an entry's inputs are sharded (data parallelism) binds named dims: `B` is the extent of the rank's
own part, and what is computed from it follows. Every other axis divides extents: an attribute that repeats the shape
of the node's result (`reshape`, `expand`, `zeros`) is divided as that is placed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mgraph.ir.graph import Function, Module, Node
from mgraph.ir.types import Shard, TensorType

SHAPE_ATTRS = ("shape", "size")
"""Attributes that repeat the shape of the only result."""


def dividing_axes(module: Module, sizes: Mapping[str, int]) -> dict[str, int]:
    """The axes, with their sizes, that divide extents instead of binding named dims."""
    inputs = [p.type for e in module.entries.values() for p in module.functions[e.function].params]
    binding = {axis for type_ in inputs if isinstance(type_, TensorType) for axis, _ in type_.placement}
    return {axis: size for axis, size in sizes.items() if axis not in binding and size > 1}


def declared_sizes(module: Module) -> dict[str, int]:
    """The sizes of the basic axes that are known before launch."""
    return {axis.name: axis.size for axis in module.mesh if not axis.of and axis.size is not None}


def local_type(type_: TensorType, dividing: Mapping[str, int]) -> TensorType:
    """The type with the extents of one rank's part along the dividing axes; placements stay."""
    split = [(axis, p) for axis, p in type_.placement if axis in dividing and isinstance(p, Shard)]
    if not split:
        return type_
    shape = TensorType(type_.dtype, type_.shape, tuple(split)).local_shape(dict(dividing))
    return TensorType(type_.dtype, shape, type_.placement)


def local_attrs(node: Node, dividing: Mapping[str, int]) -> Mapping[str, Any]:
    """The attributes that one rank runs the node with."""
    if not dividing or len(node.results) != 1 or not any(name in node.attrs for name in SHAPE_ATTRS):
        return node.attrs
    type_ = node.results[0].type
    local = local_type(type_, dividing) if isinstance(type_, TensorType) else type_
    if local is type_:
        return node.attrs
    assert isinstance(type_, TensorType) and isinstance(local, TensorType)
    attrs = dict(node.attrs)
    for name in SHAPE_ATTRS:
        shape = attrs.get(name)
        if isinstance(shape, tuple) and len(shape) == len(type_.shape):
            pairs = zip(shape, type_.shape, local.shape, strict=True)
            attrs[name] = tuple(part if given == whole else given for given, whole, part in pairs)
    return attrs


def localized(module: Module) -> Module:
    """The module with the attributes that one rank runs its nodes with; types stay those of whole tensors."""
    dividing = dividing_axes(module, declared_sizes(module))
    if not dividing:
        return module
    return replace(module, functions={n: _localized(f, dividing) for n, f in module.functions.items()})


def _localized(function: Function, dividing: Mapping[str, int]) -> Function:
    nodes = []
    for node in function.nodes:
        attrs = local_attrs(node, dividing)
        nodes.append(node if attrs is node.attrs else replace(node, attrs=attrs))
    return replace(function, nodes=tuple(nodes))


def part(tensor: Any, type_: TensorType, sizes: Mapping[str, int], place: Mapping[str, int]) -> Any:
    """The part of a whole tensor that the rank at `place` (coordinates by axis) holds; of a partial sum the whole."""
    for axis, placement in type_.placement:
        if isinstance(placement, Shard):
            tensor = tensor.chunk(sizes[axis], placement.dim)[place[axis]]
    return tensor
