"""What an op works on is made wider, from the weights on: each weight of a walk is read through a view that makes it
longer along the dim that would be split, and all that is made of it has the longer dim, too.

The states stay as they are; so do the ops, but for attributes that repeat a shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mgraph.ir.builder import FunctionBuilder, rebuild
from mgraph.ir.dims import Dim
from mgraph.ir.graph import Function, Node, Value
from mgraph.ir.local import SHAPE_ATTRS
from mgraph.ir.types import Placement, Shard
from mgraph.passes.parallel_sites import NoSite, Walk


@dataclass
class Widening:
    """One widening of a function: `extent` gives the new length of a split dim of some length, `view` the longer form
    of a weight.

    `sites` are the nodes that the walk began at, with attributes that they get. With `cut`, other readers of what
    becomes wider get its first part, as long as before; without, there must be none.
    """

    walk: Walk
    sites: Mapping[Node, Mapping[str, Any]]
    extent: Callable[[Dim], Dim]
    view: Callable[[FunctionBuilder, Value, Shard], Value]
    cut: bool = False
    _wide: dict[Value, Value] = field(default_factory=dict)

    def function(self, made_by: str) -> Function:
        """The function with it. Raises NoSite where it cannot be."""
        function = self.walk.function
        read = self._read_elsewhere()
        builder = rebuild(function, made_by)
        for node in function.nodes:
            if node not in self.walk.rules and node not in self.sites:
                builder.keep(node)
                continue
            with builder.at(node):
                self._node(builder, node)
                for value in node.results:
                    if value in self._wide and value in read:
                        builder.replace(value, self._cut(builder, value))
        return builder.build(function.results)

    def _node(self, builder: FunctionBuilder, node: Node) -> None:
        """A node on wider operands."""
        places = self.walk.rules[node].results if node in self.walk.rules else (None,) * len(node.results)
        if node.op == "dropout":
            raise NoSite(f"dropout %{node.id} draws its numbers by the places in the whole tensor")
        operands = tuple(self._operand(builder, value) for value in node.operands)
        results = tuple(self._wider(v, place) for v, place in zip(node.results, places, strict=True))
        attrs = {**_attrs(node, places, results), **self.sites.get(node, {})}
        builder.nodes.append(replace(node, operands=operands, results=results, attrs=attrs))

    def _operand(self, builder: FunctionBuilder, value: Value) -> Value:
        if value in self.walk.weights and value not in self._wide:
            self._wide[value] = self.view(builder, value, self.walk.weights[value])
        return self._wide.get(value) or builder.value(value)

    def _wider(self, value: Value, place: Placement | None) -> Value:
        """A result with the longer dim, under its name."""
        if not isinstance(place, Shard):
            return value
        shape = list(value.tensor.shape)
        shape[place.dim] = self.extent(shape[place.dim])
        self._wide[value] = Value(value.name, value.tensor.with_shape(*shape))
        return self._wide[value]

    def _cut(self, builder: FunctionBuilder, value: Value) -> Value:
        dim = self.walk.split[value].dim
        attrs = {"dim": dim, "end": value.tensor.shape[dim]}
        return builder.one("aten.slice.Tensor", self._wide[value], name=f"{value.name}_cut", **attrs)

    def _read_elsewhere(self) -> set[Value]:
        """What becomes wider and is read by others. Raises NoSite where that must not be."""
        function, found = self.walk.function, set()
        made = [pair for node, rule in self.walk.rules.items() for pair in zip(node.results, rule.results, strict=True)]
        for value in (value for value, place in made if isinstance(place, Shard)):
            others = [n for n in self.walk.users.get(value, ()) if n not in self.walk.rules and n not in self.sites]
            if others or value in function.results:
                found.add(value)
                if not self.cut:
                    reader = f"{others[0].op} %{others[0].id}" if others else "the caller"
                    raise NoSite(f"%{value.name} is read by {reader}, too")
        return found


def _attrs(node: Node, places: tuple[Placement | None, ...], results: tuple[Value, ...]) -> dict[str, Any]:
    """Attributes that repeat the shape of the only result follow it."""
    attrs: dict[str, Any] = dict(node.attrs)
    place = places[0]
    if len(results) != 1 or not isinstance(place, Shard):
        return attrs
    for name in SHAPE_ATTRS:
        shape = attrs.get(name)
        if isinstance(shape, tuple) and shape[place.dim] == node.result.tensor.shape[place.dim]:
            attrs[name] = (*shape[: place.dim], results[0].tensor.shape[place.dim], *shape[place.dim + 1 :])
    return attrs
