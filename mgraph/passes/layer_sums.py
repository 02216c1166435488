"""Sums of what a layer gave, made after all layers: which nodes may as well be the layer's own.

    %y = … at "layers.0"                                       Losses of routers are often written so: each layer gives
    %y_1 = … at "layers.1"                                     its logits [T, E], and counts and means [E] of them are
    %p = softmax(%y)      at "model"       ← of layers.0       made at the end. As part of the layers, the large values
    %m = mean(%p, [0])    at "model"       ← of layers.0       need not outlive them, and calls give small ones.
    %p_1 = softmax(%y_1)  at "model"       ← of layers.1
    %m_1 = mean(%p_1)     at "model"       ← of layers.1

A node is a layer's if it is made of values of that layer and of constants alone (no state, no input), and is needed for
a value of fixed size that is made of one whose size is not. Where only one layer of a list has such a value it stays
where it is: that layer would differ from all others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from mgraph.ir.graph import Function, Node, Value
from mgraph.ir.types import TensorType
from mgraph.passes.keys import attrs_key

Layer = tuple[str, str]
"""A list of layers, and the index in it."""


def adopted(function: Function, layer_at: Callable[[str], Layer | None]) -> dict[Node, Layer]:
    """The layer of each node outside of layers that sums up one; `layer_at` tells it of a module path."""
    maker: dict[Value, Node] = {}
    source: dict[Value, Layer | None] = {}  # of values made of one layer or, None, of none; others are not in it
    outside: dict[Node, Layer] = {}
    sums: list[Node] = []
    for node in function.nodes:
        layer = layer_at(node.origin.path)
        if layer is None:
            if not all(value in source for value in node.operands):
                continue
            found = {source[value] for value in node.operands} - {None}
            if len(found) > 1:
                continue
            layer = next(iter(found), None)
            if layer is not None:
                outside[node] = layer
                if all(map(_is_fixed, node.results)) and not all(map(_is_fixed, node.operands)):
                    sums.append(node)
        for value in node.results:
            source[value] = layer
            maker[value] = node
    return _alike(sums, outside, maker)


def _alike(sums: list[Node], outside: Mapping[Node, Layer], maker: Mapping[Value, Node]) -> dict[Node, Layer]:
    """What makes the sums that several layers of a list have."""
    cones: list[tuple[Any, list[Node]]] = []
    for node in sums:
        cone, todo = [], [node]
        seen = {node}
        while todo:
            cone.append(todo.pop())
            new = {maker[value] for value in cone[-1].operands} & outside.keys() - seen
            seen |= new
            todo += sorted(new, key=lambda n: n.id)
        key = outside[node][0], tuple(sorted(str((n.op, attrs_key(n.attrs))) for n in cone))
        cones.append((key, cone))
    layers = Counter(key for key, _ in {(key, outside[cone[0]]): None for key, cone in cones})
    return {node: outside[node] for key, cone in cones if layers[key] > 1 for node in cone}


def _is_fixed(value: Value) -> bool:
    """Whether a value has the same size whatever the batch is."""
    return isinstance(value.type, TensorType) and all(isinstance(extent, int) for extent in value.type.shape)
