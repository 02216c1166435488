"""Loops found in a function, and those that must not be."""

from __future__ import annotations

from dataclasses import replace

from mgraph.codegen.loops import Carried, Outside, Slot, Stacked, find_loops, template
from mgraph.codegen.prepare import prepare
from mgraph.ir.graph import Function
from tests.codegen.mlp import module


def microbatch() -> Function:
    return prepare(module())["microbatch"]


def test_template() -> None:
    assert template(["a.0.w", "a.1.w", "a.2.w"]) == ("a.{}.w", range(3))
    assert template(["a.2.w", "a.1.w"]) == ("a.{}.w", range(2, 0, -1))
    for names in (["a.0.w", "a.2.w"], ["a.0.w", "b.1.w"], ["a.w", "a.v"], ["a.0", "a.1.w"]):
        assert template(names) is None


def test_forward_and_backward_loops() -> None:
    forward, backward = find_loops(microbatch())
    assert (forward.period, forward.count, forward.layers) == (1, 4, range(4))
    assert isinstance(forward.operands[0, 0], Carried)
    assert forward.operands[0, 1] == Slot("layers.{}.up.weight")
    assert forward.pushed == {(0, 1)}
    assert (backward.count, backward.layers) == (4, range(3, -1, -1))
    assert backward.operands[0, 0] == Stacked(0, 0, 1, False)
    assert isinstance(backward.operands[0, 1], Carried)


def test_a_value_of_a_middle_iteration_prevents_the_loop() -> None:
    function = microbatch()
    second = function.nodes[2].results[0]
    loops = find_loops(replace(function, results=(*function.results, second)))
    assert all(loop.start > 2 or loop.end <= 2 for loop in loops)


def test_invariant_operands_are_outside() -> None:
    function = microbatch()
    same = function.nodes[1].operands[1]
    nodes = [
        replace(n, operands=(n.operands[0], same, *n.operands[2:])) if n.op == "call" else n for n in function.nodes
    ]
    loops = find_loops(replace(function, nodes=tuple(nodes)))
    assert loops[0].operands[0, 1] == Outside()
