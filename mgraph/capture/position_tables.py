"""How many positions a model has where it looks them up in a table, as GPT-2 does: torch proves nothing about it, since
a lookup is one for any numbers, and past the last row it fails on the CPU and reads other memory on a GPU.

    %arange = aten.arange.default() {end = S}
    %row = aten.embedding.default(@wpe.weight, %arange)        wpe.weight f32[64, 8], so S <= 64

Positions are also counted by a cumulative sum of ones, as of a mask that masks nothing (OPT). They are followed through
changes of shape and dtype, and sums with a number (a table may begin with rows for something else). What is made of
them otherwise, as by a remainder, bounds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from mgraph.errors import OptionError
from mgraph.ir.dims import symbol
from mgraph.ir.graph import Function, Module, Node, Value

SEQUENCE = "S"
POSITIONS = "position_ids"
"""The input that counts the positions of each document of a row, from 0."""

_SHAPES = ("expand", "permute", "transpose", "clone", "unsqueeze", "squeeze")
_SAME = {"cast", "reshape", *(f"aten.{op}" for op in _SHAPES)}
_SUMS = {"aten.add": 1, "aten.sub": -1}


@dataclass(frozen=True)
class Table:
    """A table with a row for each of the first `positions` positions, and the node that reads it."""

    name: str
    positions: int
    node: Node

    def __str__(self) -> str:
        return f"{self.name} has rows for {self.positions} positions, and is read at {self.node.origin}"


def with_bounded_length(module: Module, asked: int | None) -> Module:
    """The module with S no longer than its position tables. Raises OptionError where `asked`, the longest sequence that
    the person wants, is more than the model has positions for."""
    tables = [table for function in module.functions.values() for table in _tables(function)]
    least = min(tables, key=lambda table: table.positions, default=None)
    dim = module.dims.get(SEQUENCE)
    if dim is None:
        return module
    bounds = [n for n in (dim.maximum, None if least is None else least.positions) if n is not None]
    most = min(bounds, default=None)
    if asked is not None and most is not None and asked > most:
        why = str(least) if least is not None and least.positions == most else "its forward holds for no more"
        problem = f"max_length is {asked}, and the model has at most {most} positions: {why}"
        raise OptionError(problem, where="--max-length", hint=f"at most {most}")
    return replace(module, dims={**module.dims, SEQUENCE: replace(dim, maximum=most)})


def _tables(function: Function) -> Iterator[Table]:
    """Tables that are read at positions of a whole sequence."""
    counts = _Counts({p: 0 for p in function.params if p.name == POSITIONS})
    for node in function.nodes:
        counts.add(node)
        for table, rows, index in _lookups(node):
            if index in counts.begins and isinstance(rows, int):
                yield Table(table.name, rows - counts.begins[index], node)


@dataclass
class _Counts:
    """The values that count positions, each with the number that stands for the first one; and those that are ones."""

    begins: dict[Value, int]
    ones: set[Value] = field(default_factory=set)

    def add(self, node: Node) -> None:
        """Take in what a node makes."""
        base = node.op.rpartition(".")[0] or node.op
        if base in ("aten.ones", "aten.ones_like") or (base in _SAME and node.operands[0] in self.ones):
            self.ones.add(node.result)
        begin = self._begin(node, base)
        if begin is not None:
            self.begins[node.result] = begin

    def _begin(self, node: Node, base: str) -> int | None:
        if base == "aten.arange" and node.result.tensor.shape == (symbol(SEQUENCE),) and node.attrs.get("step", 1) == 1:
            start = node.attrs.get("start", 0)
            return start if isinstance(start, int) else None
        first, *others = node.operands or (None,)
        if base == "aten.cumsum" and first in self.ones:
            dim = node.attrs["dim"]
            return 1 if isinstance(dim, int) and node.result.tensor.shape[dim] == symbol(SEQUENCE) else None
        begin = None if first is None else self.begins.get(first)
        if begin is None or not self.ones.issuperset(others):
            return None
        other, factor = node.attrs.get("other"), node.attrs.get("alpha", 1)
        if base in _SUMS and not others and isinstance(other, int) and isinstance(factor, int):
            return begin + _SUMS[base] * factor * other
        return begin if base in _SAME or (base == "aten.mul" and others) else None


def _lookups(node: Node) -> Iterator[tuple[Value, object, Value]]:
    """The tables that a node reads rows of: each with its number of rows and what says which."""
    if node.op == "aten.embedding.default":
        yield node.operands[0], node.operands[0].tensor.shape[0], node.operands[1]
    elif node.op == "aten.index_select.default":
        dim = node.attrs["dim"]
        assert isinstance(dim, int)
        yield node.operands[0], node.operands[0].tensor.shape[dim], node.operands[1]
    elif node.op == "aten.index.Tensor":
        names = node.attrs["args"]
        assert isinstance(names, tuple)
        table = node.operands[0]
        for name, index in list(zip(names, node.operands, strict=True))[1:]:
            yield table, table.tensor.shape[int(str(name).rpartition(".")[2])], index
