"""Whole parameters that ranks gather: which states values are gathered from, and gathers whose results lie together.

%p = all_gather_start(@q, @k, @v) {together = true}         the results lie one after another, as `joined` reads them
%whole_q, %whole_k, %whole_v = wait(%p…)
… = call @layer.fwd(…, %whole_q, %whole_k, %whole_v)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

from mgraph.ir.graph import Function, Module, Node, State, Value
from mgraph.ir.types import Shard
from mgraph.passes.calls import callee, roots

GATHER = "all_gather_start"


def gathered_states(module: Module) -> dict[Value, tuple[str, ...]]:
    """The states that values are gathered from, whole, one for each way in which the entries reach the function of a
    value: the results of gathers, and the params that calls hand them to. What is also handed something else is left
    out."""
    found: dict[Value, list[str | None]] = {}

    def visit(function: Function, names: dict[Value, str]) -> None:
        for param in function.params:
            found.setdefault(param, []).append(names.get(param))
        pending: dict[Value, str] = {}
        for node in function.nodes:
            if node.op == GATHER:
                pending.update((r, v.name) for v, r in zip(node.operands, node.results, strict=True) if v.is_state)
            elif node.op == "wait":
                made = {r: pending[v] for v, r in zip(node.operands, node.results, strict=True) if v in pending}
                names = names | made
                for value, name in made.items():
                    found.setdefault(value, []).append(name)
            elif node.op == "call":
                inner = module.functions[callee(node)]
                given = zip(inner.params, node.operands, strict=False)
                visit(inner, {param: names[value] for param, value in given if value in names})

    for name in roots(module):
        visit(module.functions[name], {})
    complete = {value: [name for name in names if name is not None] for value, names in found.items()}
    return {value: tuple(names) for value, names in complete.items() if names and len(names) == len(found[value])}


class Gathers:
    """The gathers of a module: `of_value` has the states that values are gathered from (`gathered_states`)."""

    def __init__(self, module: Module) -> None:
        self.of_value = gathered_states(module)
        self._of_state: dict[str, list[Node]] = {}
        for _, node in module.walk():
            for value in node.operands if node.op == GATHER else ():
                if value.is_state:
                    self._of_state.setdefault(value.name, []).append(node)

    def make_whole(self, state: State) -> bool:
        """Whether a state is whole, and one piece, once it is gathered: its shards are of rows."""
        axes = {(axis, placed.dim) for axis, placed in state.type.placement if isinstance(placed, Shard)}
        given = [node.attrs for node in self._of_state.get(state.name, ())]
        return all(axes == {(attrs["axis"], attrs["dim"])} and attrs["dim"] == 0 for attrs in given)

    def have_in_order(self, chain: Sequence[str]) -> bool:
        """Whether all gathers of states of a chain have all of them, one after another."""
        pairs = set(itertools.pairwise(chain))
        nodes = [node for name in chain for node in self._of_state.get(name, ())]
        return all(pairs <= set(itertools.pairwise(value.name for value in node.operands)) for node in nodes)


def with_results_together(module: Module, states: Iterable[str], made_by: str) -> Module:
    """The module in which the results of all gathers of these states lie together."""
    wanted = frozenset(states)

    def changed(node: Node) -> Node:
        if node.op != GATHER or not any(v.is_state and v.name in wanted for v in node.operands):
            return node
        return replace(node, attrs={**node.attrs, "together": True}, made_by=made_by)

    functions = {n: replace(f, nodes=tuple(map(changed, f.nodes))) for n, f in module.functions.items()}
    return replace(module, functions=functions)
