"""In-place ops of a trace, as values: which names of a tensor see a write, and slices that assemble a whole.

A write through one name is seen by all names of the same memory. The importer renames those that hold the very value
written. A name that covers another part (a view) may not be read afterwards; that is an error, with one exception: a
new, uninitialised tensor whose slices along one dim are all written becomes their concatenation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mgraph.capture.unsupported import is_view, op_name
from mgraph.ir.dims import Dim
from mgraph.ir.graph import Value

_EMPTY = frozenset({"aten.new_empty.default", "aten.empty.memory_format", "aten.empty_like.default"})
_SLICE = "aten.slice.Tensor"


@dataclass(frozen=True, slots=True)
class Piece:
    """`value` fills extents start..end of a dim."""

    start: Dim
    end: Dim
    value: Value


class Memory:
    """Which nodes of one graph share memory, and the pieces written so far into uninitialised tensors."""

    def __init__(self, graph: Any) -> None:
        self._position = {node: i for i, node in enumerate(graph.nodes)}
        self._root: dict[Any, Any] = {}
        self._names: dict[Any, list[Any]] = {}
        self.pieces: dict[Any, dict[int, list[Piece]]] = {}
        for node in graph.nodes:
            shares = node.op == "call_function" and node.args and (is_view(node) or self.writes(node))
            root = self._root[node.args[0]] if shares and node.args[0] in self._root else node
            self._root[node] = root
            self._names.setdefault(root, []).append(node)

    @staticmethod
    def writes(node: Any) -> bool:
        """Whether a node is an in-place op."""
        schema = getattr(node.target, "_schema", None)
        return schema is not None and schema.is_mutable

    def root(self, node: Any) -> Any:
        """The node that made a node's memory."""
        return self._root[node]

    def names(self, node: Any) -> list[Any]:
        """All nodes that share the memory of a node, itself included."""
        return self._names[self._root[node]]

    def read_after(self, node: Any, write: Any) -> bool:
        """Whether a node made before a write is read after it."""
        here = self._position[write]
        return self._position[node] < here and any(self._position[user] > here for user in node.users)

    def is_new(self, node: Any) -> bool:
        """Whether the memory of a node is a new uninitialised tensor."""
        return node.op == "call_function" and op_name(self._root[node]) in _EMPTY

    def slices(self, node: Any) -> list[Any] | None:
        """The chain of slices from a root to a node, `None` where another view is among them."""
        chain = []
        while node is not self._root[node]:
            if op_name(node) != _SLICE:
                return None
            chain.append(node)
            node = node.args[0]
        return chain


def tiled(pieces: list[Piece], extent: Dim) -> list[Piece] | None:
    """The pieces in order where they fill a dim without gap or overlap, else `None`."""
    ordered: list[Piece] = []
    position: Dim = 0
    while position != extent:
        following = [p for p in pieces if p.start == position and p.end != position]
        if len(following) != 1 or len(ordered) == len(pieces):
            return None
        ordered.append(following[0])
        position = following[0].end
    return ordered
