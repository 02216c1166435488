"""The call structure of a module."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mgraph.ir.graph import Function, Module, Node, Value


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
