"""The proof of the order of collectives: what is right passes, and each way to be wrong is named with node and line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mgraph.ir.collective_proof import RULES, WANTED, CollectiveOrderError, prove
from mgraph.ir.dims import Extent, NamedDim, symbol
from mgraph.ir.graph import Axis, Module, Node, Static, Value
from mgraph.ir.types import TensorType
from mgraph.step_order import KINDS
from tests.ir.layers import layers

Break = Callable[[Module], Module]


def changed(function: str, op: str, change: Callable[[Node], Node]) -> Break:
    """Another node in the place of the first one of an op; readers of its results read the new ones."""

    def apply(module: Module) -> Module:
        body = module.functions[function]
        old = next(n for n in body.nodes if n.op == op)
        new = change(old)
        swap = dict(zip(old.results, new.results, strict=True))
        nodes = [
            new if n is old else replace(n, operands=tuple(swap.get(v, v) for v in n.operands)) for n in body.nodes
        ]
        return module.with_function(
            replace(body, nodes=tuple(nodes), results=tuple(swap.get(v, v) for v in body.results))
        )

    return apply


def attrs(**given: Any) -> Callable[[Node], Node]:
    return lambda node: replace(node, attrs={**node.attrs, **given})


def operand(change: Callable[[TensorType], TensorType]) -> Callable[[Node], Node]:
    def apply(node: Node) -> Node:
        value = node.operands[0]
        return replace(node, operands=(Value(value.name, change(value.tensor)), *node.operands[1:]))

    return apply


def dropped(function: str, op: str) -> Break:
    def apply(module: Module) -> Module:
        body = module.functions[function]
        return module.with_function(replace(body, nodes=tuple(n for n in body.nodes if n.op != op)))

    return apply


def waits_twice(module: Module) -> Module:
    body = module.functions["main"]
    wait = next(n for n in body.nodes if n.op == "wait")
    again = replace(wait, results=(Value("again", wait.result.type),))
    return module.with_function(replace(body, nodes=(*body.nodes, again)))


def returns_pending(module: Module) -> Module:
    body = module.functions["main"]
    start = next(n for n in body.nodes if n.op == "all_reduce_start")
    nodes = tuple(n for n in body.nodes if n.op != "wait")
    return module.with_function(replace(body, nodes=nodes, results=(start.result,)))


def ragged(module: Module) -> Module:
    bound = NamedDim("R", 0, None, 2 * symbol("B"), Extent.HOST)
    module = replace(module, dims={**module.dims, "R": bound})
    return changed("main", "all_reduce_start", operand(lambda t: replace(t, shape=(symbol("R"),))))(module)


CASES: dict[str, tuple[Break, str]] = {
    "conditional": (
        changed("main", "aten.slice.Tensor", attrs(branches=("ahead", "none"))),
        "[control] may run @ahead node %h_0, from model.py:20",
    ),
    "callee of the caller": (
        changed("main", "call", attrs(callee=Static("which"))),
        "[control] depends on who calls node %p_0, from model.py:19",
    ),
    "axis of the caller": (
        changed("layer", "reduce_scatter", attrs(axis=Static("axis"))),
        "[axis] which each call may choose node %y, from model.py:14",
    ),
    "no axis": (
        changed("layer", "reduce_scatter", attrs(axis="pt")),
        "[axis] which is no axis of the mesh node %y, from model.py:14",
    ),
    "product with itself": (
        lambda m: replace(m, mesh=(*m.mesh[:2], Axis("all", of=("tp", "tp")))),
        "[axis] holds an axis twice node %sum, from model.py:23",
    ),
    "wrong group": (
        changed("layer", "reduce_scatter", attrs(axis="dp")),
        "[fit] takes what is partial (sum) there, and %flat is S(0) node %y, from model.py:14",
    ),
    "group too small": (
        changed("main", "all_reduce_start", attrs(axis="dp")),
        "[fit] takes what is partial (sum) there, and %part is R node %sum, from model.py:23",
    ),
    "swapped kinds": (
        changed("layer", "reduce_scatter", lambda n: replace(n, op="all_gather")),
        "[fit] takes what is sharded along dim 1 there, and %flat is P(sum) node %y, from model.py:14",
    ),
    "other reduction": (
        changed("main", "all_reduce_start", attrs(reduction="max")),
        "[fit] takes what is partial (max) there node %sum, from model.py:23",
    ),
    "gather along another dim": (
        changed("ahead", "all_gather_start", attrs(dim=0)),
        "[fit] sharded along dim 0 node %whole, from model.py:10",
    ),
    "uneven": (
        changed("main", "all_to_all", lambda n: _wider(n, 18)),
        "[elements] does not divide over tp=4 node %turned, from model.py:21",
    ),
    "no fact": (
        lambda m: replace(m, facts=()),
        "[elements] S, does not divide over tp=4 node %whole, from model.py:10",
    ),
    "open axis": (
        lambda m: replace(m, mesh=(m.mesh[0], Axis("tp"), m.mesh[2])),
        "[elements] whose size is known at launch only node %whole, from model.py:10",
    ),
    "sizes of nobody": (
        changed("main", "all_to_all", attrs(rows="R")),
        "[sizes] none that ranks of tp have told each other node %turned, from model.py:21",
    ),
    "read back": (ragged, "[elements] extent R of f32[R]{all=P(sum)} is read back node %sum, from model.py:23"),
    "never ended": (dropped("main", "wait"), "[pending] ended 0 times node %sum, from model.py:23"),
    "never ended in another function": (
        dropped("layer", "wait"),
        "[pending] %whole is under way, and ended 0 times function @layer",
    ),
    "ended twice": (waits_twice, "[pending] ended 2 times node %again, from model.py:25"),
    "outlives the entry": (
        returns_pending,
        "[pending] still under way when the entry ends node %sum, from model.py:23",
    ),
    "read too early": (
        changed("main", "wait", lambda n: replace(n, op="aten.neg.default")),
        "[pending] read by aten.neg.default while it is under way node %loss, from model.py:25",
    ),
}


def _wider(node: Node, extent: int) -> Node:
    value, result = node.operands[0], node.result
    types = [replace(v.tensor, shape=(*v.tensor.shape[:2], extent)) for v in (value, result)]
    return replace(node, operands=(Value(value.name, types[0]),), results=(Value(result.name, types[1]),))


@pytest.mark.parametrize(("dp", "tp"), [(2, 4), ("*", 8), (1, 1)])
def test_a_right_module_passes(dp: int | str, tp: int) -> None:
    assert prove(layers(dp=dp, tp=tp)).length("main") == 8


@pytest.mark.parametrize("case", CASES)
def test_wrong(case: str) -> None:
    apply, expected = CASES[case]
    with pytest.raises(CollectiveOrderError) as caught:
        prove(apply(layers()))
    rule, said = expected.split("] ")[0][1:], expected.split("] ")[1]
    text = str(caught.value)
    assert f"[{rule}: {RULES[rule][0]}]" in text
    for part in said.replace(" node ", "\0node ").replace(" function ", "\0function ").split("\0"):
        assert part in text, text
    assert caught.value.exit_code == 2


def test_every_rule_has_a_case() -> None:
    assert {said.split("]")[0][1:] for _, said in CASES.values()} == set(RULES)


def test_every_collective_has_a_rule_of_fit() -> None:
    assert set(WANTED) == set(KINDS)


def steps_of(module: Module) -> int:
    """Lines of Python that a proof runs: a measure of work that does not depend on the machine."""
    count = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        prove(module)
    finally:
        sys.settrace(None)
    return count


def test_the_cost_does_not_depend_on_the_ranks_and_hardly_on_the_depth() -> None:
    few, many = layers(8, dp=16, tp=4), layers(8, dp=128, tp=8)
    for module in (few, many):  # what is cached is cached now
        prove(module)
    assert steps_of(few) == pytest.approx(steps_of(many), rel=0.1)
    # What a layer adds is its two calls in the entry, not what it issues.
    shallow, deep = steps_of(layers(10)), steps_of(layers(110))
    assert (deep - shallow) / 100 < 120
