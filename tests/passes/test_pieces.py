"""Pieces of functions: where they begin and end, what they are handed, and what they give."""

from __future__ import annotations

from dataclasses import replace

import torch

from mgraph.ir.graph import Function, Module, Node
from mgraph.ir.interpreter import run
from mgraph.ir.parser import parse_module
from mgraph.ir.verifier import verify
from mgraph.passes.pieces import Split, split

TEXT = """
dim B 1..
state @w.grad: f32[4] = grad init [["zeros_"]]
func @layer(%x: f32[B, 4], %y: f32[B, 4]; %total: f32[4]) static (times) {
  %a: f32[B, 4] = aten.mul.Tensor(%x, %y)
  %b: f32[B, 4] = aten.mul.Scalar(%a) {other = $times}
  %c: f32[B, 4] = aten.tanh.default(%b)
  %d: f32[4] = aten.sum.dim_IntList(%c) {dim = [0]}
  %new: f32[4] = accumulate_(%total, %d)
  %mean: f32[] = aten.mean.default(%c)
  %e: f32[B, 4] = aten.mul.Tensor(%c, %mean)
  %f: f32[B, 4] = aten.add.Tensor(%e, %x)
  %g: f32[B, 4] = aten.mul.Tensor(%f, %y)
  %h: f32[B, 4] = aten.sub.Tensor(%g, %c)
  return %h, %new
}
func @main(%x: f32[B, 4], %y: f32[B, 4]) {
  %h: f32[B, 4], %grad: f32[4] = call @layer(%x, %y; @w.grad) {static.times = 3.0}
  %h_1: f32[B, 4], %grad_1: f32[4] = call @layer(%h, %x; %grad) {static.times = 0.5}
  return %h_1, %grad_1
}
entry step = @main -> (h) updates (@w.grad)
"""


def parsed(text: str) -> Module:
    """A module of nodes from one line of a model."""
    lines = (f'{line} forward at "layers.0" "model.py":1 by test' if " = " in line[:-1] and line[:2] == "  " else line
             for line in text.splitlines())  # fmt: skip
    return parse_module('mgraph-ir 1\nmodule "two"' + "\n".join(lines) + "\n")


def waits(node: Node) -> bool:
    return node.op != "aten.mean.default"


def pieces(module: Module) -> Split:
    return split(module.functions["layer"], waits, {}, lambda number: f"layer.part{number}")


def applied(module: Module, parts: Split) -> Module:
    made = {function.name: function for function in (parts.function, *parts.pieces)}
    return replace(module, functions={**module.functions, **made})


def test_runs_become_functions() -> None:
    module = parsed(TEXT)
    parts = pieces(module)
    assert [node.op for node in parts.function.nodes] == ["call", "aten.mean.default", "call"]
    assert parts.taken == 9
    first, second = parts.pieces
    assert names(first) == (["x", "y"], ["total"], ["c", "new"], ("times",))
    assert names(second) == (["c", "mean", "x", "y"], [], ["h"], ())
    assert parts.function.nodes[0].attrs["callee"] == "layer.part1"


def names(function: Function) -> tuple[list[str], list[str], list[str], tuple[str, ...]]:
    lists = (function.params, function.slots, function.results)
    params, slots, results = ([value.name for value in values] for values in lists)
    return params, slots, results, function.statics


def test_they_mean_the_same() -> None:
    module = parsed(TEXT)
    split_up = applied(module, pieces(module))
    verify(split_up)
    given = {"x": torch.randn(3, 4), "y": torch.randn(3, 4)}
    found, expected = (run(m, "step", given, {"w.grad": torch.ones(4)}) for m in (split_up, module))
    assert torch.equal(found[0]["h"], expected[0]["h"]) and torch.equal(found[1]["w.grad"], expected[1]["w.grad"])


def test_few_nodes_stay_where_they_are() -> None:
    module = parsed(TEXT)
    parts = split(module.functions["layer"], lambda node: node.op == "aten.tanh.default", {}, lambda number: "part")
    assert parts.function is module.functions["layer"] and parts.pieces == ()


NUMBERED = """
dim B 1..
axis tp = 2
func @layer(%x: f32[B, 4]) {
  %a: f32[B, 4] = aten.mul.Tensor(%x, %x)
  %b: f32[B, 4] = aten.tanh.default(%a)
  %index: i64[] = axis_index() {axis = "tp"}
  %c: f32[B, 4] = aten.mul.Tensor(%b, %index)
  %d: f32[B, 4] = aten.exp.default(%c)
  return %d
}
"""


def test_the_number_of_a_rank_is_made_before() -> None:
    parts = split(parsed(NUMBERED).functions["layer"], lambda node: True, {}, lambda number: "part")
    assert [node.op for node in parts.function.nodes] == ["axis_index", "call"]
    assert names(parts.pieces[0]) == (["x", "index"], [], ["d"], ())


FLAT = """
dim B 1..
dim S 1..
func @layer(%x: f32[B*S, 4], %y: f32[B, S, 4]) {
  %a: f32[B*S, 4] = aten.mul.Tensor(%x, %x)
  %b: f32[B*S, 4] = aten.tanh.default(%a)
  %c: f32[B*S, 4] = aten.exp.default(%b)
  %d: f32[B, S, 4] = reshape(%c) {shape = [B, S, 4]}
  %e: f32[B, S, 4] = aten.exp.default(%d)
  %f: f32[B, S, 4] = aten.mul.Tensor(%e, %READ)
  return %f
}
"""


def test_a_piece_is_told_the_extents_that_it_speaks_of() -> None:
    for read, count in {"y": 1, "e": 0}.items():
        function = parsed(FLAT.replace("READ", read)).functions["layer"]
        assert len(split(function, lambda node: True, {}, lambda number: "part").pieces) == count
