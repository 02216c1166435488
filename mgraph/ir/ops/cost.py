"""What the costs of ops are made of: bytes moved between memory and the chip, and counts of elements."""

from __future__ import annotations

from collections.abc import Callable

from mgraph.ir.dims import Dim, as_dim
from mgraph.ir.graph import Node, Value


def value_bytes(value: Value) -> Dim:
    """Bytes of one value (packed sub-byte types round down)."""
    return as_dim(value.tensor.numel * value.tensor.dtype.bits // 8)


def traffic(node: Node) -> Dim:
    """Bytes of a node that reads each operand once and writes each result once."""
    return as_dim(sum(map(value_bytes, (*node.operands, *node.results))))


def per_element(count: int) -> Callable[[Node], Dim]:
    """A cost of `count` operations for each element of the first operand."""
    return lambda node: as_dim(count * node.operands[0].tensor.numel)
