"""What the costs of ops are made of: bytes moved between memory and the chip, and counts of elements."""

from __future__ import annotations

from collections.abc import Callable

from mgraph.ir.dims import Dim, as_dim
from mgraph.ir.graph import Node, Value
from mgraph.ir.opdef import op_def
from mgraph.ir.types import PendingType, TensorType

_CONTRACTED = {f"aten.{op}.default": 0 for op in ("linear", "mm", "bmm", "matmul")} | {
    f"aten.{op}.default": 1 for op in ("addmm", "baddbmm")
}
"""Matrix products of torch, with the operand whose last dim is summed over."""


def value_bytes(value: Value) -> Dim:
    """Bytes of one value (packed sub-byte types round down), or of the tensor that a pending one turns into."""
    tensor = value.type.value if isinstance(value.type, PendingType) else value.type
    return as_dim(tensor.numel * tensor.dtype.bits // 8)


def traffic(node: Node) -> Dim:
    """Bytes of a node that reads each operand once and writes each result once."""
    return as_dim(sum(map(value_bytes, (*node.operands, *node.results))))


def flops_of(node: Node) -> Dim:
    """Operations of a node: as its op declares, else those of a matrix product, else one per element of the results."""
    # Ops of torch declare none, and asking for their declaration would import torch.
    declared = None if "." in node.op else op_def(node.op).flops
    if declared is not None:
        return as_dim(declared(node))
    elements = sum(v.type.numel for v in node.results if isinstance(v.type, TensorType))
    contracted = _CONTRACTED.get(node.op)
    return as_dim(elements if contracted is None else 2 * elements * node.operands[contracted].tensor.shape[-1])


def per_element(count: int) -> Callable[[Node], Dim]:
    """A cost of `count` operations for each element of the first operand."""
    return lambda node: as_dim(count * node.operands[0].tensor.numel)
