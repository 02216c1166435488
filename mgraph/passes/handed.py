"""What a forward hands its backward, exchanged: another value of the forward in the place of one that it kept.

%y, %rows = call @fwd(%x)                 ==>     %y, %x_sent = call @fwd(%x)
%dx = call @bwd(%dy, %rows)                       %dx = call @bwd(%dy, %x_sent)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.graph import Function, Module, Value
from mgraph.passes.calls import callee, roots
from mgraph.passes.sources import Made


@dataclass(frozen=True)
class Exchange:
    """A parameter of a function, what it stands for so far, the value of that function which is to be handed instead,
    and the parameter that stands for it from now on."""

    param: Value
    made: Made
    value: Value
    new: Value


def obstacle(module: Module, function: Function, param: Value, made: Made) -> str:
    """Why the calls of `function` cannot be handed anything else for a parameter, which stands for `made`; "" if they
    can: where what they are handed has no other reader."""
    place, index = function.params.index(param), made.function.results.index(made.value)
    if made.function.results.count(made.value) > 1 or made.function.name in roots(module):
        return f"{made.value!r} is handed to others, too"
    for caller in module.functions.values():
        kept = {n.results[index] for n in caller.nodes if n.op == "call" and callee(n) == made.function.name}
        for node in caller.nodes if kept else ():
            for at, value in enumerate(node.operands):
                ours = node.op == "call" and callee(node) == function.name and at == place
                if value in kept and not ours:
                    return f"{made.value!r} is read by {node.op}, too"
        if kept & set(caller.results):
            return f"{made.value!r} is a result of {caller.name}"
    return ""


def exchanged(module: Module, name: str, exchanges: Sequence[Exchange]) -> Module:
    """The module in which the function of a name is handed other values; none of them has an `obstacle`."""
    functions = dict(module.functions)
    for exchange in exchanges:
        taker, giver = functions[name], functions[exchange.made.function.name]
        index = giver.results.index(exchange.made.value)
        params = tuple(exchange.new if v is exchange.param else v for v in taker.params)
        functions[name] = replace(taker, params=params)
        results = tuple(exchange.value if i == index else v for i, v in enumerate(giver.results))
        functions[giver.name] = replace(giver, results=results)
        for caller in functions.values():
            functions[caller.name] = _passed(caller, giver.name, index, exchange.value)
    return replace(module, functions=functions)


def _passed(caller: Function, giver: str, index: int, value: Value) -> Function:
    """A function whose calls of another give a value of another type."""
    names = FunctionBuilder(caller.name, "", caller.names())
    made: dict[Value, Value] = {}
    for node in caller.nodes:
        if node.op == "call" and callee(node) == giver:
            made[node.results[index]] = Value(names.fresh(value.name), value.type)
    return caller.with_values(made) if made else caller
