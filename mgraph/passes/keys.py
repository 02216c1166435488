"""Hashable keys that tell whether two nodes compute the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mgraph.ir.graph import Node, Value


def attr_key(value: Any) -> Any:
    """A hashable form of an attribute in which `1`, `1.0` and `True` differ, and equal floats are bitwise equal."""
    if isinstance(value, tuple):
        return tuple(map(attr_key, value))
    if isinstance(value, float):
        return float, value.hex()
    return type(value), value


def attrs_key(attrs: Mapping[str, Any]) -> tuple[Any, ...]:
    """A hashable form of a node's attributes, whatever their order."""
    return tuple(sorted(((name, attr_key(value)) for name, value in attrs.items()), key=lambda item: item[0]))


def node_key(node: Node, operands: Iterable[Value]) -> tuple[Any, ...]:
    """Equal for two nodes that compute the same from these operands in the same phase, if their types are equal."""
    return node.op, tuple(operands), attrs_key(node.attrs), node.phase
