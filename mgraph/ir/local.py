"""What one rank runs of a node: attributes speak of the whole tensor, as types do, and a rank holds its part.

An extent lies over a mesh axis in one of two ways. A named dim that the inputs of an entry are sharded along (`B` over
a data axis) is *bound* on each rank to its own part, and what is computed from it follows. Every other extent is
divided by the axis: an attribute that repeats the shape of the node's result (`reshape`, `expand`, `zeros`) is divided
as that is placed. One axis may do both: fully sharded data parallelism binds `B`, and divides the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mgraph.ir.dims import Dim, Extent, names_in
from mgraph.ir.facts import dependent, multiples, share
from mgraph.ir.graph import Axis, Function, Module, Node, Value
from mgraph.ir.types import Shard, TensorType

SHAPE_ATTRS = ("shape", "size", "input_sizes")
"""Attributes that repeat the shape of the only result."""


COUNTED = {"even_ends": ("num_experts", 0), "moe_dispatch": ("num_experts", 2), "moe_order": ("num_experts", 1)}
"""Ops with an attribute that is the extent of the first dim of a result, by its number."""


def bound_dims(module: Module) -> frozenset[tuple[str, str]]:
    """Named dims with the basic axes over which each rank binds them to its own part."""
    parts = {axis.name: axis.of or (axis.name,) for axis in module.mesh}
    return frozenset(
        (name, part)
        for entry in module.entries.values()
        for value in module.functions[entry.function].params
        if isinstance(value.type, TensorType)
        for axis, placement in value.type.placement
        if isinstance(placement, Shard)
        for part in parts[axis]
        for dim in names_in(value.type.shape[placement.dim])
        for name in dependent(module.dims, dim)
    )


def data_axes(mesh: Iterable[Axis], bound: frozenset[tuple[str, str]]) -> list[str]:
    """The basic axes along which ranks see different inputs, major first."""
    return [axis.name for axis in mesh if not axis.of and axis.name in {a for _, a in bound}]


def declared_sizes(module: Module) -> dict[str, int]:
    """The sizes of the basic axes that are known before launch."""
    return {axis.name: axis.size for axis in module.mesh if not axis.of and axis.size is not None}


@dataclass(frozen=True)
class Division:
    """How axes of these sizes divide extents, but those of `bound` dims."""

    sizes: Mapping[str, int]
    bound: frozenset[tuple[str, str]]
    multiples: Mapping[str, int] = field(default_factory=dict)
    """Named dims that are known to be multiples of a number."""
    bounds: Mapping[str, Dim] = field(default_factory=dict)
    """What ragged dims have room for, but for those whose extents the host reads."""
    read: frozenset[str] = frozenset()
    """The dims whose extents the host reads: each tensor tells its own."""

    @staticmethod
    def of(module: Module, sizes: Mapping[str, int]) -> Division:
        """The division of a module's extents by axes; one of a single rank divides nothing."""
        known = multiples((fact.text for fact in module.facts), sizes)
        read = frozenset(d.name for d in module.dims.values() if d.extent is Extent.HOST)
        bounds = {d.name: d.bound for d in module.dims.values() if d.bound is not None and d.name not in read}
        several = {axis: size for axis, size in sizes.items() if size > 1}
        return Division(several, bound_dims(module), known, bounds, read)

    def divides(self, extent: Dim, axis: str) -> bool:
        """Whether an extent that is sharded over an axis is divided by it."""
        return axis in self.sizes and not any((name, axis) in self.bound for name in names_in(extent))

    def local_type(self, type_: TensorType) -> TensorType:
        """The type with the extents of one rank's part; placements stay."""
        shape = list(type_.shape)
        for axis, placement in type_.placement:
            if isinstance(placement, Shard) and self.divides(type_.shape[placement.dim], axis):
                part = share(shape[placement.dim], self.sizes[axis], self.multiples)
                if part is None:
                    raise ValueError(f"dim {placement.dim} of {type_} does not divide over {axis}={self.sizes[axis]}")
                shape[placement.dim] = part
        return type_ if shape == list(type_.shape) else TensorType(type_.dtype, tuple(shape), type_.placement)

    def local_value(self, value: Value) -> Value:
        """The value with the type of one rank's part."""
        if not self.sizes or not isinstance(value.type, TensorType):
            return value
        return replace(value, type=self.local_type(value.type))

    def local_node(self, node: Node) -> Node:
        """The node with the types of one rank's parts; attributes stay."""
        if not self.sizes:
            return node
        return node.with_values(tuple(map(self.local_value, node.operands)), tuple(map(self.local_value, node.results)))

    def local_attrs(self, node: Node) -> Mapping[str, Any]:
        """The attributes that one rank runs the node with."""
        if self.sizes and node.op in COUNTED:
            return self._counted(node)
        if not self.sizes or len(node.results) != 1 or not any(name in node.attrs for name in SHAPE_ATTRS):
            return node.attrs
        type_ = node.results[0].type
        local = self.local_type(type_) if isinstance(type_, TensorType) else type_
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

    def _counted(self, node: Node) -> Mapping[str, Any]:
        """The attributes of a node one of which is the extent of a result."""
        name, result = COUNTED[node.op]
        type_ = node.results[result].tensor
        local = self.local_type(type_).shape[0]
        return node.attrs if local == type_.shape[0] else {**node.attrs, name: local}


WHOLE = Division({}, frozenset())
"""That of a single rank, which has all of everything."""


def localized(module: Module) -> Module:
    """The module with the attributes that one rank runs its nodes with; types stay those of whole tensors."""
    division = Division.of(module, declared_sizes(module))
    if not division.sizes:
        return module
    return replace(module, functions={n: _localized(f, division) for n, f in module.functions.items()})


def _localized(function: Function, division: Division) -> Function:
    nodes = []
    for node in function.nodes:
        attrs = division.local_attrs(node)
        nodes.append(node if attrs is node.attrs else replace(node, attrs=attrs))
    return replace(function, nodes=tuple(nodes))


def part(tensor: Any, type_: TensorType, sizes: Mapping[str, int], place: Mapping[str, int]) -> Any:
    """The part of a whole tensor that the rank at `place` (coordinates by axis) holds; of a partial sum the whole."""
    for axis, placement in type_.placement:
        if isinstance(placement, Shard):
            tensor = tensor.chunk(sizes[axis], placement.dim)[place[axis]]
    return tensor
