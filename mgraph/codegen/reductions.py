"""Reductions over ranks work in place: what is read again after one is reduced in a copy.

Before:

    %sum = all_reduce(%x) {axis = "tp"}
    %y = aten.mul(%x, %sum)

After:

    %x_copy = aten.clone(%x)
    %sum = all_reduce(%x_copy) {axis = "tp"}
    %y = aten.mul(%x, %sum)

A tensor that others may hold is read again as far as a function can know: its params, what a call gives, and state,
unless all that the function still does to it is to overwrite it (the reset of an accumulator).
"""

from __future__ import annotations

from dataclasses import replace

from mgraph.codegen.liveness import may_alias
from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.graph import Function, Node, Value

_IN_PLACE = ("all_reduce", "all_reduce_start")
_OVERWRITING = ("zero", "zero_")


def with_copies(function: Function) -> Function:
    """The function, with copies of what is reduced in place and read again."""
    if not any(node.op in _IN_PLACE for node in function.nodes):
        return function
    sources = _Sources(function)
    last_read = sources.last_reads()
    names = FunctionBuilder(function.name, "", function.names())
    nodes: list[Node] = []
    for index, node in enumerate(function.nodes):
        if node.op in _IN_PLACE:
            operands = list(node.operands)
            for place, value in enumerate(operands):
                again = max(last_read.get(source, -1) for source in sources.of(value)) > index
                if again or not sources.of(value).isdisjoint(sources.shared):
                    operands[place] = Value(names.fresh(f"{value.name.rpartition('.')[2]}_copy"), value.type)
                    copy = replace(
                        node, op="aten.clone.default", operands=(value,), results=(operands[place],), attrs={}
                    )
                    nodes.append(copy)
            node = replace(node, operands=tuple(operands))
        nodes.append(node)
    return replace(function, nodes=tuple(nodes))


class _Sources:
    """The values that made the memory of each value: itself, or those that it may be a view of."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.shared: set[Value] = set(function.inputs())
        """Sources that others may hold."""
        self._of: dict[Value, frozenset[Value]] = {}
        for node in function.nodes:
            if node.op in ("call", "unpack"):
                self.shared.update(node.results)
            elif may_alias(node.op):
                viewed = frozenset[Value]().union(*map(self.of, node.operands))
                self._of.update(dict.fromkeys(node.results, viewed))

    def of(self, value: Value) -> frozenset[Value]:
        """The sources of a value."""
        return self._of.get(value, frozenset((value,)))

    def last_reads(self) -> dict[Value, int]:
        """The last node that reads what a source made, the number of nodes where it is returned."""
        nodes = self.function.nodes
        overwritten = {v for node in nodes if node.op in _OVERWRITING for v in node.operands}
        returned = (value for value in self.function.results if value not in overwritten)
        last = {source: len(nodes) for value in returned for source in self.of(value)}
        for index, node in enumerate(nodes):
            if node.op not in _OVERWRITING:
                for value in node.operands:
                    for source in self.of(value):
                        last[source] = max(index, last.get(source, -1))
        return last
