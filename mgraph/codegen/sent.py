"""Messages and what runs beside them: which nodes make what is sent next, so that their kernels write it where other
ranks can fetch it, and which functions put work off until then."""

from __future__ import annotations

from collections.abc import Mapping

from mgraph.codegen.liveness import VIEWS
from mgraph.codegen.prepare import called
from mgraph.ir.graph import Function, Node, Value

EXCHANGES = ("all_to_all", "all_to_all_start")


def sent_next(function: Function) -> Mapping[Node, str]:
    """By node the axis over which the next `all_to_all` of the function sends all its results, which nothing else
    reads. Between such nodes and the message stand only others of its kind and views, so that nothing writes what they
    read, and no other message takes their place. Messages whose sizes are read from the device are left out."""
    readers: dict[Value, int] = {}
    for value in (*function.results, *(v for node in function.nodes for v in node.operands)):
        readers[value] = readers.get(value, 0) + 1
    found: dict[Node, str] = {}
    for index, node in enumerate(function.nodes):
        if node.op not in EXCHANGES or node.attrs.get("rows") is not None:
            continue
        sent = set(node.operands)
        for maker in reversed(function.nodes[:index]):
            if maker.results and all(value in sent and readers[value] == 1 for value in maker.results):
                found[maker] = str(node.attrs["axis"])
            elif maker.op not in VIEWS:
                break
    return found


def puts_off(function: Function, functions: Mapping[str, Function]) -> bool:
    """Whether a function, or one that it calls, has sums that may be made late."""
    return any(
        node.attrs.get("late") or (node.op == "call" and puts_off(functions[called(node)], functions))
        for node in function.nodes
    )
