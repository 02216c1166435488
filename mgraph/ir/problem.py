"""What a verifier rule is, what it looks at, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mgraph.ir.changes import alike_functions, unchanged_functions
from mgraph.ir.dims import Dim
from mgraph.ir.graph import Entry, Function, Module, Node, State, Value
from mgraph.ir.types import PendingType, TensorType, Type


@dataclass(frozen=True, slots=True)
class Problem:
    """One breach of a rule: what is wrong, where (a function and a node, if it is in one), what to do."""

    message: str
    function: Function | None = None
    node: Node | None = None
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """A named rule: what it says, in one sentence, and the check that yields its breaches."""

    name: str
    says: str
    check: Callable[[Scope], Iterable[Problem]]


@dataclass(frozen=True, slots=True)
class Typed:
    """A tensor type of a module with the place where it stands: a state, a function's input, or a node's result."""

    type: TensorType
    value: Value
    function: Function | None = None
    node: Node | None = None

    @property
    def what(self) -> str:
        """The place in words."""
        if self.node is not None:
            return repr(self.value)
        return f"input {self.value!r}" if self.function is not None else f"state {self.value!r}"

    def problem(self, message: str) -> Problem:
        """A breach at this place."""
        return Problem(f"{self.what}: {message}", self.function, self.node)


def tensor_type(type_: Type) -> TensorType:
    """The type of the tensor that a value is or will be."""
    return type_.value if isinstance(type_, PendingType) else type_


@dataclass(frozen=True, slots=True)
class Scope:
    """What a verification looks at: these parts of a module. Whatever they refer to is looked up in `module`.

    `nodes` are those of the functions that need to be looked at by themselves: a node is immutable, so one that has
    passed before is right wherever it stands, as long as its function defines what it reads.
    """

    module: Module
    states: Mapping[str, State]
    functions: Mapping[str, Function]
    entries: Mapping[str, Entry]
    nodes: tuple[tuple[Function, Node], ...]
    types: tuple[Typed, ...]

    def walk(self) -> Iterator[tuple[Function, Node]]:
        """The nodes to be looked at, with their function."""
        return iter(self.nodes)


def all_dims(type_: TensorType) -> tuple[Dim, ...]:
    """Every extent in a type: of its dims, its physical form and its factors."""
    stored = type_.physical.shape if type_.physical is not None else ()
    return (*type_.shape, *stored, *(d for _, parts in type_.factors for d in parts))


def _types(
    states: Mapping[str, State], functions: Mapping[str, Function], nodes: Iterable[tuple[Function, Node]]
) -> Iterator[Typed]:
    """Every type, where it first stands; types equal down to the form of their extents are looked at once."""
    objects: set[int] = set()
    seen: set[tuple[Any, ...]] = set()
    for value, function, node in _values(states, functions, nodes):
        if id(value.type) in objects:
            continue
        objects.add(id(value.type))
        type_ = tensor_type(value.type)
        key = (type_, *map(type, all_dims(type_)))
        if key not in seen:
            seen.add(key)
            yield Typed(type_, value, function, node)


def _values(
    states: Mapping[str, State], functions: Mapping[str, Function], nodes: Iterable[tuple[Function, Node]]
) -> Iterator[tuple[Value, Function | None, Node | None]]:
    for state in states.values():
        yield state.value, None, None
    for function in functions.values():
        for value in function.inputs():
            yield value, function, None
    for function, node in nodes:
        if node.op != "call":  # the results of a call have the types of its callee's, which are looked at there
            for value in node.results:
                yield value, function, node


def scope_of(module: Module, known: Module | None = None) -> Scope:
    """The whole module, or what has changed since a module that is `known` to be right.

    Where something that all functions may refer to has changed (dims, mesh, a state, an entry function that is none any
    more), that is the whole module again.
    """
    if known is None or not _same_surroundings(module, known):
        nodes = tuple(module.walk())
        types = tuple(_types(module.state, module.functions, nodes))
        return Scope(module, module.state, module.functions, module.entries, nodes, types)
    alike = alike_functions(module, known)
    unchanged = unchanged_functions(module, known, alike)
    functions = {name: function for name, function in module.functions.items() if name not in unchanged}
    passed = {node for _, node in known.walk() if node.op != "call" or node.attrs.get("callee") in alike}
    nodes = tuple((function, n) for function in functions.values() for n in function.nodes if n not in passed)
    states = {name: state for name, state in module.state.items() if known.state.get(name) is not state}
    entries = {
        name: entry
        for name, entry in module.entries.items()
        if known.entries.get(name) is not entry or entry.function not in unchanged
    }
    return Scope(module, states, functions, entries, nodes, tuple(_types(states, functions, nodes)))


def _same_surroundings(module: Module, known: Module) -> bool:
    entries = {entry.function for entry in module.entries.values()}
    return (
        module.dims == known.dims
        and module.mesh == known.mesh
        and all(entry.function in entries for entry in known.entries.values())
        and all(module.state.get(name) is state for name, state in known.state.items())
    )
