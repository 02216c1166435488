"""Building and rebuilding functions: the one way that captures and passes make nodes.

`FunctionBuilder` appends nodes with fresh value names and inferred types. `rebuild` starts from an existing function:
the pass walks the old nodes and either `keep`s each one (operands replaced as recorded by `replace`) or emits others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace as dataclass_replace
from typing import TYPE_CHECKING, Any

from mgraph.ir.graph import Function, Node, Origin, Phase, Value
from mgraph.ir.opdef import op_def
from mgraph.ir.types import Type

if TYPE_CHECKING:
    from collections.abc import Iterator

_NUMBERED = re.compile(r"^(.*?)_(\d+)$")


class FunctionBuilder:
    """Appends nodes to a function under construction. New nodes get the current `phase`, `origin` and `made_by`."""

    def __init__(self, name: str, made_by: str, taken: Iterable[str] = (), phase: Phase = Phase.FORWARD) -> None:
        self.name = name
        self.made_by = made_by
        self.phase = phase
        self.origin = Origin()
        self.params: list[Value] = []
        self.slots: list[Value] = []
        self.statics: tuple[str, ...] = ()
        self.nodes: list[Node] = []
        self._taken = set(taken)
        self._next: dict[str, int] = {}
        self._replaced: dict[Value, Value] = {}

    def fresh(self, base: str) -> str:
        """A name not taken: `base`, then `base_1`, `base_2`, …"""
        name = base
        while name in self._taken:
            self._next[base] = self._next.get(base, 0) + 1
            name = f"{base}_{self._next[base]}"
        self._taken.add(name)
        return name

    def fresh_like(self, value: Value) -> str:
        """A fresh name derived from another value's (its number is dropped)."""
        found = _NUMBERED.match(value.name)
        return self.fresh(found.group(1) if found else value.name)

    def param(self, name: str, type_: Type) -> Value:
        """Add a parameter."""
        value = Value(self.fresh(name), type_)
        self.params.append(value)
        return value

    def slot(self, name: str, type_: Type) -> Value:
        """Add a state slot."""
        value = Value(self.fresh(name), type_)
        self.slots.append(value)
        return value

    def emit(
        self,
        op: str,
        operands: Sequence[Value],
        attrs: Mapping[str, Any] | None = None,
        *,
        types: Sequence[Type] | None = None,
        names: Sequence[str] | None = None,
    ) -> tuple[Value, ...]:
        """Append a node and give its results. Types are inferred, and names derived from the op, unless given."""
        attrs = dict(attrs or {})
        operands = tuple(self.value(v) for v in operands)
        if types is None:
            types = op_def(op).result_types([v.type for v in operands], attrs)  # type: ignore[misc]
        base = op.split(".")[1] if "." in op else op
        names = names or [base] * len(types)
        results = tuple(Value(self.fresh(n), t) for n, t in zip(names, types, strict=True))
        self.nodes.append(Node(op, operands, results, attrs, self.phase, self.origin, self.made_by))
        return results

    def one(self, op: str, *operands: Value, name: str | None = None, **attrs: Any) -> Value:
        """Append a node and give its first result."""
        if name is None:
            return self.emit(op, operands, attrs)[0]
        types = op_def(op).result_types([self.value(v).type for v in operands], attrs)  # type: ignore[misc]
        names = [name, *(f"{name}_{i}" for i in range(1, len(types)))]
        return self.emit(op, operands, attrs, types=types, names=names)[0]

    def value(self, old: Value) -> Value:
        """What an old value has become."""
        while old in self._replaced:
            old = self._replaced[old]
        return old

    def replace(self, old: Value, new: Value) -> None:
        """From here on, readers of `old` read `new`."""
        new = self.value(new)
        if new is not old:
            self._replaced[old] = new

    def keep(self, node: Node) -> Node:
        """Append an existing node; the same object if its operands did not change."""
        operands = tuple(self.value(v) for v in node.operands)
        if operands != node.operands:
            node = dataclass_replace(node, operands=operands)
        self.nodes.append(node)
        return node

    @contextmanager
    def at(self, node: Node, phase: Phase | None = None) -> Iterator[None]:
        """New nodes take the origin (and, unless given, the phase) of a node they stand for."""
        before = self.origin, self.phase
        self.origin, self.phase = node.origin, phase or node.phase
        try:
            yield
        finally:
            self.origin, self.phase = before

    def build(self, results: Sequence[Value]) -> Function:
        """The finished function."""
        return Function(
            self.name,
            tuple(self.params),
            tuple(self.slots),
            tuple(self.nodes),
            tuple(self.value(v) for v in results),
            self.statics,
        )


def rebuild(function: Function, made_by: str) -> FunctionBuilder:
    """A builder with the function's name, inputs and taken names, and no nodes yet."""
    builder = FunctionBuilder(function.name, made_by, function.names())
    builder.params, builder.slots = list(function.params), list(function.slots)
    builder.statics = function.statics
    return builder
