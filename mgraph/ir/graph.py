"""The intermediate graph: Module, Function, Node, Value, State, Entry.

Everything is immutable; a pass builds new functions with `mgraph.ir.builder` and returns a new module. Values and
nodes compare by identity. A value keeps its object and its name as long as a pass keeps it: the name is the stable id
by which `diff` and `explain` speak of it, and a node's id is the name of its first result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TypeAlias

from mgraph.ir.dims import Dim, NamedDim
from mgraph.ir.types import DType, Placement, TensorType, Type


class Phase(StrEnum):
    """Where in a step a node belongs."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where in the user's program a node comes from: module path (`layers.*.mlp`), source file and line."""

    path: str = ""
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.file else "<built>"


@dataclass(frozen=True, slots=True)
class Static:
    """An attribute value that each call of the function supplies (a lifted constant, such as a layer's window)."""

    name: str


AttrValue: TypeAlias = "int | float | bool | str | DType | Dim | Static | tuple[AttrValue, ...] | None"


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """One SSA value. `is_state` marks the old value of a module state (`@name` in the text)."""

    name: str
    type: Type
    is_state: bool = False

    def __repr__(self) -> str:
        return f"{'@' if self.is_state else '%'}{self.name}"

    @property
    def tensor(self) -> TensorType:
        """The type, known to be a tensor."""
        assert isinstance(self.type, TensorType), f"{self!r} is {self.type}, not a tensor"
        return self.type


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One operation. `made_by` names the pass that made it; a pass that rewrites a node hands its origin on.

    A `call` node has the attr `callee`; its operands are the callee's params, then its slots; attrs that start with
    `static.` supply the callee's statics.
    """

    op: str
    operands: tuple[Value, ...]
    results: tuple[Value, ...]
    attrs: Mapping[str, AttrValue] = field(default_factory=dict)
    phase: Phase = Phase.FORWARD
    origin: Origin = Origin()
    made_by: str = "capture"

    @property
    def id(self) -> str:
        """Stable id within the function: the name of the first result."""
        return self.results[0].name

    @property
    def result(self) -> Value:
        """The only result."""
        assert len(self.results) == 1, f"{self.op} {self.id} has {len(self.results)} results"
        return self.results[0]

    def with_values(self, operands: tuple[Value, ...], results: tuple[Value, ...]) -> Node:
        """The same operation on other values (as `dataclasses.replace` would, which is slow for thousands of nodes)."""
        return Node(self.op, operands, results, self.attrs, self.phase, self.origin, self.made_by)

    def __repr__(self) -> str:
        return f"{', '.join(map(repr, self.results))} = {self.op}({', '.join(map(repr, self.operands))})"


@dataclass(frozen=True, slots=True, eq=False)
class Function:
    """A named body. `slots` are state handed in by the caller; `statics` are attribute names that calls supply."""

    name: str
    params: tuple[Value, ...]
    slots: tuple[Value, ...]
    nodes: tuple[Node, ...]
    results: tuple[Value, ...]
    statics: tuple[str, ...] = ()

    def producers(self) -> dict[Value, Node]:
        """The node that makes each value (params, slots and state have none)."""
        return {v: node for node in self.nodes for v in node.results}

    def users(self) -> dict[Value, list[Node]]:
        """The nodes that read each value, in order, once per read; results of the function are not counted."""
        users: dict[Value, list[Node]] = {}
        for node in self.nodes:
            for value in node.operands:
                users.setdefault(value, []).append(node)
        return users

    def inputs(self) -> tuple[Value, ...]:
        """Params, then slots: the operand order of a call."""
        return self.params + self.slots

    def with_values(self, mapping: Mapping[Value, Value]) -> Function:
        """The function with values exchanged; those that are not mentioned stay."""

        def all_of(values: tuple[Value, ...]) -> tuple[Value, ...]:
            return tuple([mapping.get(v, v) for v in values])

        nodes = tuple(n.with_values(all_of(n.operands), all_of(n.results)) for n in self.nodes)
        params, slots, results = map(all_of, (self.params, self.slots, self.results))
        return replace(self, params=params, slots=slots, nodes=nodes, results=results)

    def names(self) -> set[str]:
        """Every value name taken in the function."""
        return {v.name for v in self.inputs()} | {v.name for n in self.nodes for v in n.results}


class StateKind(StrEnum):
    """What a state is for; decides who initialises, shards and saves it."""

    PARAM = "param"
    BUFFER = "buffer"
    MASTER = "master"  # fp32 copy of a low-precision param
    MOMENT = "moment"
    GRAD = "grad"
    SCALAR = "scalar"
    CACHE = "cache"


InitCall = tuple[str | float | int | tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class State:
    """State of a module: outlives a call. `value` is its old value, the operand that entry functions read.

    `init` is the program of recorded in-place calls (ARCHITECTURE.md, manifest `init`); `seed_name` keys its random
    numbers; `trainable` marks parameters that get a gradient; one that is `host` lies in the host's memory.
    """

    name: str
    value: Value
    kind: StateKind
    init: tuple[InitCall, ...] = ()
    trainable: bool = False
    persist: bool = True
    seed_name: str = ""
    host: bool = False

    @property
    def type(self) -> TensorType:
        """The state's tensor type."""
        return self.value.tensor

    def placed(self, axis: str, placement: Placement | None) -> State:
        """The state, with a value that lies so over a mesh axis."""
        return replace(self, value=Value(self.name, self.type.place(axis, placement), is_state=True))

    @staticmethod
    def make(
        name: str,
        type_: TensorType,
        kind: StateKind,
        *,
        init: tuple[InitCall, ...] = (),
        trainable: bool = False,
        persist: bool = True,
        seed_name: str = "",
    ) -> State:
        """Declare a state with a fresh value of its name."""
        value = Value(name, type_, is_state=True)
        return State(name, value, kind, init, trainable, persist, seed_name or name)


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry point. The function's results are `outputs` (named), then the new values of the states in `updates`.
    A GPU launches a `captured` one as one CUDA graph, and of any other each call of a function of `pieces`."""

    name: str
    function: str
    outputs: tuple[str, ...]
    updates: tuple[str, ...] = ()
    captured: bool = False
    pieces: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Axis:
    """A mesh axis: a size, `None` for `*` (bound at launch), or the product of other axes, major first."""

    name: str
    size: int | None = None
    of: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Fact:
    """A dim fact such as `S % tp == 0`, proved at compile time or checked at start-up."""

    text: str
    proved: bool = False


@dataclass(frozen=True, slots=True)
class Module:
    """A whole program: what `print`, `parse`, passes and codegen exchange."""

    name: str
    dims: Mapping[str, NamedDim] = field(default_factory=dict)
    mesh: tuple[Axis, ...] = ()
    facts: tuple[Fact, ...] = ()
    state: Mapping[str, State] = field(default_factory=dict)
    functions: Mapping[str, Function] = field(default_factory=dict)
    entries: Mapping[str, Entry] = field(default_factory=dict)

    def with_function(self, function: Function) -> Module:
        """The module with one function added or replaced."""
        return replace(self, functions={**self.functions, function.name: function})

    def entry_function(self, entry: str) -> Function:
        """The function behind an entry point."""
        return self.functions[self.entries[entry].function]

    def walk(self) -> Iterator[tuple[Function, Node]]:
        """All nodes with their function."""
        for function in self.functions.values():
            for node in function.nodes:
                yield function, node

    def axis_size(self, axis: str, world: int = 1) -> int:
        """The size of an axis; `*` is `world`."""
        found = {a.name: a for a in self.mesh}[axis]
        if found.of:
            size = 1
            for part in found.of:
                size *= self.axis_size(part, world)
            return size
        return world if found.size is None else found.size
