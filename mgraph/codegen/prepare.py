"""Readies the functions of a module for emission: unused ones dropped, accumulations hoisted, views of parts put where
they are read, saved values in lists.

A value that one function makes only for another one (a tensor saved for the backward pass) travels in a list: the maker
ends in `pack`, and the taker begins with `unpack`, which empties the list. So nobody but the taker holds these tensors,
and each is freed at its last use there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mgraph.codegen.bundles import list_value, with_handles, with_lists
from mgraph.codegen.liveness import PARTS, written_operands
from mgraph.codegen.reductions import with_copies
from mgraph.ir.graph import Function, Module, Node, Value
from mgraph.ir.local import localized

Place = tuple[str, int]  # a function and the index of a result or param


def prepare(module: Module) -> dict[str, Function]:
    """Functions by name, callees before callers, entry functions last."""
    module = localized(module)
    order = callees_first(module)
    entries = {entry.function for entry in module.entries.values()}
    functions = {name: _hoist_accumulations(_sink_parts(module.functions[name])) for name in order}
    functions = {n: _reduced_state(with_copies(f)) for n, f in _without_updates(functions, entries).items()}
    functions = _hand_over(functions, entries)
    return with_lists({name: with_handles(function) for name, function in functions.items()})


def called(node: Node) -> str:
    """The callee of a call node."""
    return str(node.attrs["callee"])


def callees_first(module: Module) -> list[str]:
    """The functions that the entries use, callees before callers, entry functions last."""
    order: dict[str, None] = {}

    def visit(name: str) -> None:
        if name in order:
            return
        for node in module.functions[name].nodes:
            if node.op == "call":
                visit(called(node))
        order[name] = None

    entries = [entry.function for entry in module.entries.values()]
    for name in entries:
        for node in module.functions[name].nodes:
            if node.op == "call":
                visit(called(node))
    for name in entries:
        visit(name)
    return list(order)


def _sink_parts(function: Function) -> Function:
    """Each view of a part right before its only reader: so the nodes of repeated layers have theirs among them.

    What it is a part of lives as long as the view anyway.
    """
    users, results = function.users(), set(function.results)
    sunk: dict[Node, list[Node]] = {}
    for node in function.nodes:
        readers = users.get(node.results[0], []) if node.op in PARTS else []
        if len(readers) == 1 and node.result not in results:
            sunk.setdefault(readers[0], []).append(node)
    if not sunk:
        return function
    moved = {node for nodes in sunk.values() for node in nodes}

    def placed(node: Node) -> list[Node]:
        return [*(before for part in sunk.get(node, ()) for before in placed(part)), node]

    order = [n for node in function.nodes if node not in moved for n in placed(node)]
    return replace(function, nodes=tuple(order))


def _hoist_accumulations(function: Function) -> Function:
    """Each accumulation right after what it adds: the temporary dies at once, or is never made."""
    producers, users = function.producers(), function.users()
    moved: dict[Node, list[Node]] = {}
    for node in function.nodes:
        if node.op != "accumulate_":
            continue
        total, part = node.operands
        if part in producers and total not in producers and len(users[total]) == 1:
            moved.setdefault(producers[part], []).append(node)
    hoisted = {node for nodes in moved.values() for node in nodes}
    order = [n for node in function.nodes if node not in hoisted for n in (node, *moved.get(node, ()))]
    return replace(function, nodes=tuple(order))


def _without_updates(functions: dict[str, Function], entries: set[str]) -> dict[str, Function]:
    """Results that are slots written in place are not returned: their caller has the tensor already. State that is
    written in place is read as state ever after."""
    updated: dict[str, dict[int, int]] = {}
    made = {}
    for name, function in functions.items():
        replaced: dict[Value, Value] = {}
        nodes = []
        for node in function.nodes:
            node = replace(node, operands=tuple(replaced.get(v, v) for v in node.operands))
            if node.op == "call":
                slots = updated[called(node)]
                replaced |= {node.results[r]: node.operands[o] for r, o in slots.items()}
                kept = tuple(v for r, v in enumerate(node.results) if r not in slots)
                node = replace(node, results=kept)
            count = _updated_operands(node)
            written = zip(node.results[:count], node.operands[:count], strict=True)
            replaced |= {result: state for result, state in written if state.is_state}
            nodes.append(node)
        results = [replaced.get(v, v) for v in function.results]
        updated[name] = {} if name in entries else _updated_slots(function, nodes, results)
        results = [v for r, v in enumerate(results) if r not in updated[name]]
        made[name] = replace(function, nodes=tuple(nodes), results=tuple(results))
    return made


def _updated_operands(node: Node) -> int:
    """How many operands a node updates. A reduction may still turn out to need a copy."""
    return 0 if node.op == "all_reduce" else written_operands(node)


def _reduced_state(function: Function) -> Function:
    """State that is reduced, or stored, in place is read as state when that has ended."""
    started: dict[Value, Value] = {}
    replaced: dict[Value, Value] = {}
    nodes = []
    for node in function.nodes:
        node = node.with_values(tuple(replaced.get(v, v) for v in node.operands), node.results)
        if node.op in ("all_reduce_start", "store_start"):
            started.update(zip(node.results, node.operands[: len(node.results)], strict=True))
        elif node.op == "wait":
            waited = zip(node.results, (started.get(v) for v in node.operands), strict=True)
            replaced |= {result: state for result, state in waited if state is not None and state.is_state}
        nodes.append(node)
    return replace(function, nodes=tuple(nodes), results=tuple(replaced.get(v, v) for v in function.results))


def _updated_slots(function: Function, nodes: Iterable[Node], results: Iterable[Value]) -> dict[int, int]:
    """Result index → input index, for results that are slots after in-place ops."""
    places = {v: i for i, v in enumerate(function.inputs()) if v in function.slots}
    roots: dict[Value, Value] = {v: v for v in function.slots}
    touched: set[Value] = set()
    for node in nodes:
        count = _updated_operands(node)
        for result, operand in zip(node.results[:count], node.operands[:count], strict=True):
            if operand in roots:
                roots[result] = roots[operand]
                touched.add(result)
        if node.op == "call":
            touched.update(v for v in node.operands if v in roots)
    return {r: places[roots[v]] for r, v in enumerate(results) if v in touched}


def _hand_over(functions: dict[str, Function], entries: set[str]) -> dict[str, Function]:
    """Put the values that pass from one function only to one other into lists."""
    pairs = _pairs(functions, entries)
    by_functions: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for (maker, result), (taker, param) in pairs.items():
        by_functions.setdefault((maker, taker), []).append((result, param))
    made, used = dict(functions), set[str]()
    for (maker, taker), places in by_functions.items():
        if len(places) < 2 or used & {maker, taker} or not _same_calls(functions, maker, taker, places):
            continue
        used |= {maker, taker}
        results, params = [r for r, _ in sorted(places)], [p for _, p in sorted(places)]
        made[maker] = _packed(made[maker], results)
        made[taker] = _unpacked(made[taker], params)
        for name in made:
            made[name] = _with_list(made[name], maker, results, taker, params)
    return made


def _pairs(functions: dict[str, Function], entries: set[str]) -> dict[Place, Place]:
    """Results of functions that are read exactly once, always as the same param of the same other function."""
    seen: dict[Place, Place | None] = {}
    fed: dict[Place, set[Place]] = {}
    for function in functions.values():
        users, producers = function.users(), function.producers()
        for node in function.nodes:
            if node.op != "call":
                continue
            for index, value in enumerate(node.results):
                readers = users.get(value, [])
                target: Place | None = None
                if len(readers) == 1 and readers[0].op == "call" and value not in function.results:
                    target = (called(readers[0]), readers[0].operands.index(value))
                place = (called(node), index)
                seen[place] = target if seen.get(place, target) == target else None
            for index, value in enumerate(node.operands):
                producer = producers.get(value)
                is_made = producer is not None and producer.op == "call"
                source = (called(producer), producer.results.index(value)) if producer and is_made else ("", -1)
                fed.setdefault((called(node), index), set()).add(source)
    return {
        maker: taker
        for maker, taker in seen.items()
        if taker is not None and taker[0] != maker[0] and fed[taker] == {maker} and maker[0] not in entries
    }


def _same_calls(functions: dict[str, Function], maker: str, taker: str, places: Iterable[tuple[int, int]]) -> bool:
    """Whether every call of the taker takes the whole list from one call of the maker, and is not a slot of it."""
    if any(param >= len(functions[taker].params) for _, param in places):
        return False
    for function in functions.values():
        producers = function.producers()
        for node in function.nodes:
            if node.op == "call" and called(node) == taker:
                makers = {id(producers[node.operands[param]]) for _, param in places}
                if len(makers) != 1:
                    return False
    return True


def _packed(function: Function, results: list[int]) -> Function:
    kept = list_value("saved", function.names(), [function.results[i] for i in results], handed=True)
    pack = Node("pack", tuple(function.results[i] for i in results), (kept,), made_by="emit")
    rest = tuple(v for i, v in enumerate(function.results) if i not in results)
    return replace(function, nodes=(*function.nodes, pack), results=(*rest, kept))


def _unpacked(function: Function, params: list[int]) -> Function:
    kept = list_value("saved", function.names(), [function.params[i] for i in params], handed=True)
    unpack = Node("unpack", (kept,), tuple(function.params[i] for i in params), made_by="emit")
    rest = tuple(v for i, v in enumerate(function.params) if i not in params)
    return replace(function, nodes=(unpack, *function.nodes), params=(kept, *rest))


def _with_list(function: Function, maker: str, results: list[int], taker: str, params: list[int]) -> Function:
    """The calls of maker and taker in a function, rewritten to pass the list."""
    lists: dict[Value, Value] = {}
    nodes = []
    for node in function.nodes:
        if node.op == "call" and called(node) == maker:
            kept = list_value("kept", set(), [node.results[i] for i in results], handed=True)
            lists[node.results[results[0]]] = kept
            rest = tuple(v for i, v in enumerate(node.results) if i not in results)
            node = replace(node, results=(*rest, kept))
        elif node.op == "call" and called(node) == taker:
            kept = lists[node.operands[params[0]]]
            rest = tuple(v for i, v in enumerate(node.operands) if i not in params)
            node = replace(node, operands=(kept, *rest))
        nodes.append(node)
    return replace(function, nodes=tuple(nodes))
