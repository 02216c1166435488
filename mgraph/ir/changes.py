"""What of a module is as it was in an earlier one: verifying and printing need not look at it again.

Functions are immutable, so the same object is the same function; what it calls is known to it by signatures only.
"""

from __future__ import annotations

from mgraph.ir.graph import Function, Module


def callees(function: Function) -> set[object]:
    """The names of the functions that a function calls."""
    return {node.attrs.get("callee") for node in function.nodes if node.op == "call"}


def same_signature(a: Function, b: Function) -> bool:
    """Whether calls cannot tell the functions apart: types of params, slots and results, and statics are equal."""
    return a is b or (
        len(a.params) == len(b.params)
        and a.statics == b.statics
        and [v.type for v in a.inputs()] == [v.type for v in b.inputs()]
        and [v.type for v in a.results] == [v.type for v in b.results]
    )


def alike_functions(module: Module, known: Module) -> set[object]:
    """The names under which both modules hold functions that calls cannot tell apart."""
    return {
        name
        for name, function in module.functions.items()
        if name in known.functions and same_signature(function, known.functions[name])
    }


def unchanged_functions(module: Module, known: Module, alike: set[object] | None = None) -> set[str]:
    """The functions that both modules hold as the same object, and whose callees are `alike` in both."""
    alike = alike_functions(module, known) if alike is None else alike
    return {
        name
        for name, function in module.functions.items()
        if known.functions.get(name) is function and callees(function) <= alike
    }
