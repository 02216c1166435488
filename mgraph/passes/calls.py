"""The call structure of a module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.graph import Function, Module, Node, Value

Source = tuple[str, Value]
"""A value of the function that has a name."""


def callee(node: Node) -> str:
    """The function that a `call` node calls."""
    return str(node.attrs["callee"])


def calls(function: Function) -> list[Node]:
    """The call nodes of a function, in order."""
    return [node for node in function.nodes if node.op == "call"]


def roots(module: Module) -> list[str]:
    """The functions that are used from outside: those of the entries; without entries, those that nothing calls."""
    if module.entries:
        return list(dict.fromkeys(entry.function for entry in module.entries.values()))
    called = {callee(node) for _, node in module.walk() if node.op == "call"}
    return [name for name in module.functions if name not in called]


def callers_first(module: Module, start: Iterable[str]) -> list[str]:
    """The functions reachable from `start`, each before the functions that it calls."""
    finished: list[str] = []
    seen: set[str] = set()

    def visit(name: str) -> None:
        if name not in seen:
            seen.add(name)
            for node in calls(module.functions[name]):
                visit(callee(node))
            finished.append(name)

    for name in start:
        visit(name)
    return finished[::-1]


def resolve_argument(module: Module, function: Function, value: Value) -> tuple[Function, Value]:
    """Follow a parameter to what the calls pass for it, while all calls pass the same value of the same function.

    Gives the function and value where this ends: the value itself where it is no parameter, where nothing calls the
    function, or where calls differ.
    """
    while value in function.params:
        position = function.params.index(value)
        passed = {
            (caller.name, node.operands[position]): caller
            for caller, node in module.walk()
            if node.op == "call" and callee(node) == function.name
        }
        if len(passed) != 1:
            break
        ((_, value), function) = passed.popitem()
    return function, value


def hand_down(module: Module, wanted: Mapping[str, Mapping[Value, Source]]) -> Module:
    """The module with more parameters: those that `wanted` gives each function, for which calls pass the value given.

    All calls of such a function must come from one function, and so on up to the source of the value; functions between
    the two get a parameter that hands it on.
    """
    more = {name: dict(params) for name, params in wanted.items()}
    functions = dict(module.functions)
    for name in reversed(callers_first(module, roots(module))):
        new = more.get(name)
        if not new:
            continue
        (caller,) = {function.name for function, node in module.walk() if node.op == "call" and callee(node) == name}
        above = more.setdefault(caller, {})
        passed = tuple(_within(functions[caller], above, source) for source in new.values())
        width = len(functions[name].params)
        nodes = tuple(
            replace(node, operands=(*node.operands[:width], *passed, *node.operands[width:]))
            if node.op == "call" and callee(node) == name
            else node
            for node in functions[caller].nodes
        )
        functions[name] = replace(functions[name], params=(*functions[name].params, *new))
        functions[caller] = replace(functions[caller], nodes=nodes)
    return replace(module, functions=functions)


def _within(function: Function, more: dict[Value, Source], source: Source) -> Value:
    """What a value of a source is called in a function: itself, or one of `more` parameters, made if need be."""
    name, value = source
    if function.name == name:
        return value
    for param, known in more.items():
        if known == source:
            return param
    taken = {*function.names(), *(param.name for param in more)}
    param = Value(FunctionBuilder(function.name, "", taken).fresh(value.name), value.type)
    more[param] = source
    return param


def part_of(function: Function, name: str, results: Sequence[Value]) -> Function:
    """The part of an entry function that some of its results need, under another name; unread params are dropped."""
    needed = set(results)
    nodes = []
    for node in reversed(function.nodes):
        if any(v in needed for v in node.results):
            nodes.append(node)
            needed.update(node.operands)
    params = tuple(p for p in function.params if p in needed)
    return Function(name, params, function.slots, tuple(reversed(nodes)), tuple(results), function.statics)
