"""Three notions of sameness.

`equal`: the same module, names included. `structural_hash`: the same computation, whatever values are called.
`isomorphic`: the same graph, whatever the extents are (a reduced twin and the module it stands for).
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping

import sympy

from mgraph.ir.dims import as_dim
from mgraph.ir.graph import AttrValue, Function, Module, Node, State, Value
from mgraph.ir.printer import attr_text
from mgraph.ir.types import PendingType, Type

Key = Hashable


def equal(first: Module, second: Module) -> bool:
    """Whether two modules are the same, with all names, types, origins and provenance; the order of declarations aside.

    Values, nodes and functions are compared by what they hold, never by identity.
    """
    return _module_key(first) == _module_key(second)


def attr_key(value: AttrValue) -> Key:
    """A key that is equal for equal attribute values of one kind only: `1`, `1.0`, `true` differ; `nan` is itself."""
    if isinstance(value, tuple):
        return ("tuple", *map(attr_key, value))
    if isinstance(value, float):
        return ("float", repr(value))
    if isinstance(value, sympy.Expr):
        dim = as_dim(value)
        return (type(dim).__name__ if isinstance(dim, int) else "dim", dim)
    return (type(value).__name__, value)


def attrs_key(attrs: Mapping[str, AttrValue]) -> Key:
    """A key of a node's attributes, in whatever order they stand."""
    return frozenset((name, attr_key(value)) for name, value in attrs.items())


def node_key(node: Node) -> Key:
    """What a node computes, by value names: op, operands, results with types, attributes, phase; not its origin."""
    return (
        node.op,
        tuple(map(repr, node.operands)),
        tuple((repr(v), v.type) for v in node.results),
        attrs_key(node.attrs),
        str(node.phase),
    )


def structural_hash(function: Function) -> str:
    """A digest (64 hex digits) of what a function computes, independent of its own and its values' names.

    It covers ops, wiring, types, attributes, phases and statics. States and callees count by name; origins and
    provenance do not count.
    """
    number = _numbering(function)
    lines = [f"{len(function.params)} {len(function.slots)} {function.statics}"]
    lines += [str(v.type) for v in function.inputs()]
    for node in function.nodes:
        attrs = sorted((name, attr_text(value)) for name, value in node.attrs.items())
        operands = [v.name if v.is_state else number[v] for v in node.operands]
        lines.append(f"{node.op} {operands} {attrs} {node.phase} {[str(v.type) for v in node.results]}")
    lines.append(str([v.name if v.is_state else number[v] for v in function.results]))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def isomorphic(first: Module | Function, second: Module | Function, dims: bool = False) -> bool:
    """Whether two modules (or functions) have the same functions, ops, wiring, attribute names and kinds of types.

    Extents and attribute values may differ, and so may value names; with `dims` all types and attributes must be the
    same. Functions and entries of modules pair up by name; states count by the order in which a function reads them.
    """
    if isinstance(first, Module) and isinstance(second, Module):
        if first.functions.keys() != second.functions.keys() or first.entries.keys() != second.entries.keys():
            return False
        entries = all(
            (e.function, e.outputs, len(e.updates))
            == (second.entries[name].function, second.entries[name].outputs, len(second.entries[name].updates))
            for name, e in first.entries.items()
        )
        return entries and all(isomorphic(f, second.functions[name], dims) for name, f in first.functions.items())
    assert isinstance(first, Function) and isinstance(second, Function), "two modules or two functions"
    return _shape_key(first, dims) == _shape_key(second, dims)


def _module_key(module: Module) -> Key:
    return (
        module.name,
        frozenset(module.dims.items()),
        module.mesh,
        module.facts,
        frozenset((name, _state_key(state)) for name, state in module.state.items()),
        frozenset((name, _function_key(function)) for name, function in module.functions.items()),
        frozenset(module.entries.items()),
    )


def _state_key(state: State) -> Key:
    return (
        state.name,
        *_value_key(state.value),
        str(state.kind),
        attr_key(state.init),
        state.trainable,
        state.persist,
        state.host,
        state.seed_name,
    )


def _value_key(value: Value) -> tuple[Key, ...]:
    return (value.name, value.is_state, value.type)


def _function_key(function: Function) -> Key:
    return (
        function.name,
        tuple(map(_value_key, function.params)),
        tuple(map(_value_key, function.slots)),
        function.statics,
        tuple((node_key(n), n.origin, n.made_by) for n in function.nodes),
        tuple(map(repr, function.results)),
    )


def _numbering(function: Function) -> dict[Value, int]:
    values = [*function.inputs(), *(v for n in function.nodes for v in n.results)]
    return {value: index for index, value in enumerate(values)}


def _shape_key(function: Function, dims: bool) -> Key:
    number: dict[Value, int] = {}

    def place(value: Value) -> tuple[bool, int, Key]:
        return value.is_state, number.setdefault(value, len(number)), _type_key(value.type, dims)

    inputs = (tuple(map(place, function.params)), tuple(map(place, function.slots)), function.statics)
    nodes = tuple(
        (
            node.op,
            tuple(map(place, node.operands)),
            tuple(map(place, node.results)),
            attrs_key(node.attrs) if dims else (frozenset(node.attrs), node.attrs.get("callee")),
            str(node.phase),
        )
        for node in function.nodes
    )
    return inputs, nodes, tuple(map(place, function.results))


def _type_key(type_: Type, dims: bool) -> Key:
    if dims:
        return type_
    tensor = type_.value if isinstance(type_, PendingType) else type_
    factors = tuple((dim, len(parts)) for dim, parts in tensor.factors)
    stored = None if tensor.physical is None else (tensor.physical.storage, tensor.physical.scale)
    return isinstance(type_, PendingType), tensor.dtype, len(tensor.shape), tensor.placement, factors, stored
