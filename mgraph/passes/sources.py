"""What the parameters of a function stand for: results of calls of another function, in the same caller.

A backward function is handed what the forward of its layer kept. Each call of it belongs to one call of the forward; a
parameter stands for one value of that function if each call passes the same result of the call that it belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass

from mgraph.ir.graph import Function, Module, Node, Value
from mgraph.passes.calls import callee


@dataclass(frozen=True)
class Made:
    """A value of a function, and the calls of that function by which it came here; no calls: it is made here."""

    function: Function
    value: Value
    calls: tuple[Node, ...]

    @property
    def node(self) -> Node | None:
        """What makes it; nothing where it is an input."""
        return self.function.producers().get(self.value)


class Sources:
    """Where the values of a function come from."""

    def __init__(self, module: Module, function: Function) -> None:
        self._module, self._function = module, function
        self._own = function.producers()
        self._calls: list[tuple[Node, dict[Value, Node]]] = []
        for caller in module.functions.values():
            made = caller.producers()
            ours = [n for n in caller.nodes if n.op == "call" and callee(n) == function.name]
            self._calls += [(node, made) for node in ours]
        self._known: dict[Value, Made | None] = {}

    def made(self, value: Value) -> Made | None:
        """What a value of the function is, or None where its calls do not agree."""
        if value in self._own:
            return Made(self._function, value, ())
        if value not in self._known:
            self._known[value] = self._param(value)
        return self._known[value]

    def _param(self, value: Value) -> Made | None:
        if value not in self._function.params or not self._calls:
            return None
        place = self._function.params.index(value)
        calls, found = [], set[tuple[str, int]]()
        for node, made in self._calls:
            passed = node.operands[place]
            maker = made.get(passed)
            if maker is None or maker.op != "call":
                return None
            calls.append(maker)
            found.add((callee(maker), maker.results.index(passed)))
        if len(found) != 1:
            return None
        ((name, index),) = found
        function = self._module.functions[name]
        return Made(function, function.results[index], tuple(calls))

    def is_same(self, value: Value, made: Made, other: Value) -> bool:
        """Whether a value of the function is another one of the function, and of the calls, that `made` is of."""
        if not made.calls:
            return value is other
        mine = self.made(value)
        return mine is not None and mine.calls == made.calls and mine.value is other

    def here(self, made: Made, other: Value) -> tuple[Value, list[Node]] | None:
        """What stands in the function for a value of the function that `made` is of: a value of its own, and the
        reshapes that are to be made of it, the first one first. None where nothing does."""
        if not made.calls:
            return other, []
        for param in self._function.params:
            if self.is_same(param, made, other) or self._is_passed(param, made, other):
                return param, []
        node = made.function.producers().get(other)
        if node is None or node.op != "reshape":
            return None
        below = self.here(made, node.operands[0])
        return None if below is None else (below[0], [*below[1], node])

    def _is_passed(self, param: Value, made: Made, other: Value) -> bool:
        """Whether both calls are passed the same value for a parameter of the one and of the other function."""
        if other not in made.function.params:
            return False
        mine, theirs = self._function.params.index(param), made.function.params.index(other)
        pairs = zip((node for node, _ in self._calls), made.calls, strict=True)
        return all(node.operands[mine] is call.operands[theirs] for node, call in pairs)
