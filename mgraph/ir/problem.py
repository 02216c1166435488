"""What a verifier rule is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from mgraph.ir.graph import Function, Module, Node
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
    check: Callable[[Module], Iterable[Problem]]


@dataclass(frozen=True, slots=True)
class Typed:
    """A tensor type of a module with the place where it stands: a state, a function's input, or a node's result."""

    type: TensorType
    what: str
    function: Function | None = None
    node: Node | None = None

    def problem(self, message: str) -> Problem:
        """A breach at this place."""
        return Problem(f"{self.what}: {message}", self.function, self.node)


def tensor_type(type_: Type) -> TensorType:
    """The type of the tensor that a value is or will be."""
    return type_.value if isinstance(type_, PendingType) else type_


def tensor_types(module: Module) -> Iterator[Typed]:
    """Every type in a module."""
    for state in module.state.values():
        yield Typed(state.type, f"state @{state.name}")
    for function in module.functions.values():
        for value in function.inputs():
            yield Typed(tensor_type(value.type), f"input {value!r}", function)
        for node in function.nodes:
            for value in node.results:
                yield Typed(tensor_type(value.type), repr(value), function, node)
