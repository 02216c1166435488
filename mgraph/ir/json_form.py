"""Module -> plain JSON-able data, for other tools. The text form is the one that parses back; this one only reads well.

Types, attribute values and dims are the same texts as in the printed module.
"""

from __future__ import annotations

from typing import Any

from mgraph.ir.dims import dim_text
from mgraph.ir.graph import AttrValue, Function, Module, Node, State, Value
from mgraph.ir.printer import attr_text, reference


def module_to_json(module: Module) -> dict[str, Any]:
    """The whole module as dicts, lists, strings and numbers; `version` is that of the text form."""
    return {
        "version": 1,
        "name": module.name,
        "dims": [
            {
                "name": d.name,
                "minimum": d.minimum,
                "maximum": d.maximum,
                "bound": None if d.bound is None else dim_text(d.bound),
                "extent": None if d.extent is None else str(d.extent),
            }
            for d in module.dims.values()
        ],
        "mesh": [{"name": axis.name, "size": axis.size, "of": list(axis.of)} for axis in module.mesh],
        "facts": [{"text": fact.text, "proved": fact.proved} for fact in module.facts],
        "state": [_state(state) for state in module.state.values()],
        "functions": [function_to_json(function) for function in module.functions.values()],
        "entries": [
            {
                "name": e.name,
                "function": e.function,
                "outputs": list(e.outputs),
                "updates": list(e.updates),
                "captured": e.captured,
                "pieces": list(e.pieces),
            }
            for e in module.entries.values()
        ],
    }


def function_to_json(function: Function) -> dict[str, Any]:
    """One function."""
    return {
        "name": function.name,
        "params": [_value(v) for v in function.params],
        "slots": [_value(v) for v in function.slots],
        "statics": list(function.statics),
        "nodes": [node_to_json(node) for node in function.nodes],
        "results": [reference(v) for v in function.results],
    }


def node_to_json(node: Node) -> dict[str, Any]:
    """One node; operands are references (`%name`, `@state`)."""
    return {
        "id": node.id,
        "op": node.op,
        "operands": [reference(v) for v in node.operands],
        "results": [_value(v) for v in node.results],
        "attrs": {name: _plain(value) for name, value in sorted(node.attrs.items())},
        "phase": str(node.phase),
        "origin": {"path": node.origin.path, "file": node.origin.file, "line": node.origin.line},
        "made_by": node.made_by,
    }


def _value(value: Value) -> dict[str, str]:
    return {"name": value.name, "type": str(value.type)}


def _state(state: State) -> dict[str, Any]:
    return {
        **_value(state.value),
        "kind": str(state.kind),
        "init": _plain(state.init),
        "trainable": state.trainable,
        "persist": state.persist,
        "host": state.host,
        "seed_name": state.seed_name,
    }


def _plain(value: AttrValue) -> Any:
    """JSON's own kinds as they are (numbers that JSON lacks, as text), everything else as IR text."""
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return repr(value)
    return value if value is None or isinstance(value, bool | int | float | str) else attr_text(value)
