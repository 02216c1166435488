"""Tensors that travel together are one Python list in emitted code, and what is under way is one handle.

Before:

    %a_pending, %b_pending = all_gather_start(@a, @b)
    %a, %b = wait(%a_pending, %b_pending)
    %y, %da, %db = call @f(%x, %a, %b)
    %da_pending, %db_pending = reduce_scatter_start(%da, %db)

After (`f` ends in `pack`):

    %pending = all_gather_start(@a, @b)
    %whole = wait(%pending)
    %y, %parts = call @f(%x, %whole)
    %pending_1 = reduce_scatter_start(%parts)

A list that a call takes in the place of several params is written with a star: the function that is called has them
one by one. Where another call takes some of them afterwards, `pick` makes the list of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from mgraph.ir.graph import Function, Node, Value
from mgraph.ir.types import PendingType, TensorType


@dataclass(frozen=True, slots=True)
class ListType:
    """The type of a list of tensors; `handed` where whoever gets it frees them, one by one."""

    types: tuple[TensorType, ...]
    handed: bool = False

    def __str__(self) -> str:
        return f"[{len(self.types)} tensors]"


@dataclass(frozen=True, slots=True)
class HandleType:
    """The type of a collective under way, which gives these tensors."""

    types: tuple[TensorType, ...]

    def __str__(self) -> str:
        return f"pending[{len(self.types)}]"


def list_value(name: str, taken: set[str], values: Sequence[Value], *, handed: bool = False) -> Value:
    """A value for the list of some tensors."""
    while name in taken:
        name += "_"
    return Value(name, cast(Any, ListType(tuple(v.tensor for v in values), handed)))


def is_list(value: Value) -> bool:
    """Whether a value is a list of tensors."""
    return isinstance(value.type, ListType)


def expanded(node: Node, function: Function) -> list[tuple[int, int | None]]:
    """Where each input of the function that a call runs comes from: an operand, or an element of one that is a list."""
    found: list[tuple[int, int | None]] = []
    for position, operand in enumerate(node.operands):
        if is_list(operand) and not is_list(function.inputs()[len(found)]):
            found += [(position, element) for element in range(len(operand.type.types))]  # type: ignore[union-attr]
        else:
            found.append((position, None))
    return found


def picked(node: Node) -> tuple[int, ...]:
    """The places in its list that a `pick` takes."""
    places = node.attrs["places"]
    assert isinstance(places, tuple), f"{node!r} has no places"
    return tuple(int(str(place)) for place in places)


def with_handles(function: Function) -> Function:
    """One handle for what a collective in two halves starts."""
    if not any(node.op.endswith("_start") for node in function.nodes):
        return function
    handles: dict[Value, Value] = {}
    nodes = []
    for node in function.nodes:
        if node.op.endswith("_start"):
            types = tuple(v.type.value for v in node.results if isinstance(v.type, PendingType))
            handle = Value("pending", cast(Any, HandleType(types)))
            handles |= dict.fromkeys(node.results, handle)
            node = replace(node, results=(handle,))
        elif node.op == "wait":
            found = tuple(dict.fromkeys(handles.get(v) for v in node.operands))
            assert len(found) == 1 and found[0], f"{node!r}: what was started is ended as one, in the same function"
            node = replace(node, operands=(found[0],))
        nodes.append(node)
    return replace(function, nodes=tuple(nodes))


def with_lists(functions: Mapping[str, Function]) -> dict[str, Function]:
    """Lists in the place of tensors that always travel together."""
    made = {name: _gathered(function, functions) for name, function in functions.items()}
    for name in list(made):
        made = _given(made, name)
    return made


def _gathered(function: Function, functions: Mapping[str, Function]) -> Function:
    """The function, with lists of what `wait` gives and only calls, or sums into state, take."""
    users = function.users()
    lists: dict[tuple[Value, ...], Value] = {}
    picks: dict[Node, Node] = {}
    for node in function.nodes:
        if node.op == "wait" and len(node.results) > 1 and not set(node.results) & set(function.results):
            readers = users.get(node.results[0], [])
            same = all(users.get(v) == readers for v in node.results)
            if readers and same and all(_takes(reader, node.results) for reader in readers):
                kind = {"call": "whole", "to_device_start": "on_host"}.get(readers[0].op, "parts")
                lists[node.results] = list_value(kind, set(), node.results)
            elif not same and (pair := _taken_in_part(node.results, users)):
                first, rest = pair
                lists[node.results] = list_value("whole", set(), node.results)
                lists[rest] = list_value("whole", set(), rest)
                places = tuple(node.results.index(v) for v in rest)
                picks[first] = Node("pick", (lists[node.results],), (lists[rest],), {"places": places}, made_by="emit")
    if not lists:
        return function
    by_first: dict[Value, list[tuple[Value, ...]]] = {}
    for values in lists:
        by_first.setdefault(values[0], []).append(values)
    nodes = []
    for node in function.nodes:
        operands: list[Value] = []
        position = 0
        while position < len(node.operands):
            known = by_first.get(node.operands[position], ())
            values = next((v for v in known if node.operands[position : position + len(v)] == v), ())
            operands.append(lists[values] if values else node.operands[position])
            position += len(values) or 1
        results = (lists[node.results],) if node.results in lists else node.results
        nodes.append(node.with_values(tuple(operands), results))
        if node in picks:
            nodes.append(picks[node])
    return replace(function, nodes=tuple(nodes))


def _taken_in_part(
    values: tuple[Value, ...], users: Mapping[Value, Sequence[Node]]
) -> tuple[Node, tuple[Value, ...]] | None:
    """The call that takes all tensors, and those that one other call takes afterwards; None where it is otherwise."""
    readers = list(dict.fromkeys(node for v in values for node in users.get(v, ())))
    if len(readers) != 2 or any(node.op != "call" for node in readers):
        return None
    first, second = sorted(readers, key=lambda node: -len(set(node.operands) & set(values)))
    rest = tuple(v for v in second.operands if v in set(values))
    ordered = rest == tuple(v for v in values if v in set(rest))
    if len(rest) < 2 or not ordered or not all(_takes(*taken) for taken in ((first, values), (second, rest))):
        return None
    return first, rest


def _takes(node: Node, values: tuple[Value, ...]) -> bool:
    """Whether a node takes the tensors side by side, as a list can stand for them."""
    if node.op == "call":
        start = node.operands.index(values[0])
        return node.operands[start : start + len(values)] == values
    if node.op == "to_device_start":
        return node.operands == values
    return node.op == "accumulate_each_" and node.operands[len(node.operands) // 2 :] == values


def _given(functions: dict[str, Function], name: str) -> dict[str, Function]:
    """The functions, with one list of the results of `name` that each call hands to a collective as a whole."""
    calls = [
        (function, node)
        for function in functions.values()
        for node in function.nodes
        if node.op == "call" and node.attrs["callee"] == name
    ]
    found = {_scattered(function, node) for function, node in calls}
    if len(found) != 1 or not (results := found.pop()):
        return functions
    made = dict(functions)
    body = functions[name]
    parts = list_value("parts", body.names(), [body.results[r] for r in results])
    pack = Node("pack", tuple(body.results[r] for r in results), (parts,), made_by="emit")
    rest = tuple(v for r, v in enumerate(body.results) if r not in results)
    made[name] = replace(body, nodes=(*body.nodes, pack), results=(*rest, parts))
    for caller in dict.fromkeys(function.name for function, _ in calls):
        made[caller] = _with_given(made[caller], name, results)
    return made


def _scattered(function: Function, call: Node) -> tuple[int, ...]:
    """The results of a call that a collective takes as all its operands, and nothing else reads."""
    users = function.users()
    taken = [r for r, v in enumerate(call.results) if [n.op for n in users.get(v, [])] == ["reduce_scatter_start"]]
    values = tuple(call.results[r] for r in taken)
    if len(values) < 2 or set(values) & set(function.results) or users[values[0]][0].operands != values:
        return ()
    return tuple(taken)


def _with_given(function: Function, name: str, results: Sequence[int]) -> Function:
    lists: dict[Value, Value] = {}
    nodes = []
    for node in function.nodes:
        if node.op == "call" and node.attrs["callee"] == name:
            values = [node.results[r] for r in results]
            lists[values[0]] = list_value("parts", set(), values)
            rest = tuple(v for r, v in enumerate(node.results) if r not in results)
            node = replace(node, results=(*rest, lists[values[0]]))
        elif node.op == "reduce_scatter_start" and node.operands[0] in lists:
            node = replace(node, operands=(lists[node.operands[0]],))
        nodes.append(node)
    return replace(function, nodes=tuple(nodes))
