"""Functions made ready for emission."""

from __future__ import annotations

from mgraph.codegen.prepare import prepare
from mgraph.ir.parser import parse_module
from mgraph.passes.base import Report
from mgraph.passes.fully_shard import FullyShard
from mgraph.passes.in_place import InPlace
from tests.codegen.mlp import module
from tests.passes.spread import trained


def test_callees_come_first() -> None:
    assert list(prepare(module())) == ["layer.fwd", "layer.bwd", "microbatch", "advance"]


def test_accumulations_follow_what_they_add() -> None:
    ops = [(n.op, n.results[0].name) for n in prepare(module())["layer.bwd"].nodes]
    assert ops[ops.index(("aten.mm.default", "ddown")) + 1] == ("accumulate_", "new_down")


def test_saved_values_travel_in_a_list() -> None:
    functions = prepare(module())
    forward, backward = functions["layer.fwd"], functions["layer.bwd"]
    assert forward.nodes[-1].op == "pack" and [v.name for v in forward.results] == ["y", "saved"]
    assert [v.name for v in forward.nodes[-1].operands] == ["x", "tanh"]
    assert backward.nodes[0].op == "unpack" and [v.name for v in backward.params] == ["saved", "dy"]
    calls = [n for n in functions["microbatch"].nodes if n.op == "call"]
    assert [len(n.results) for n in calls] == [2] * 4 + [1] * 4
    assert calls[3].results[1] is calls[4].operands[0]


def test_accumulators_are_not_returned() -> None:
    functions = prepare(module())
    assert [v.name for v in functions["layer.bwd"].results] == ["sum"]
    entry = module().entries["microbatch"]
    states = [v.name for v in functions["microbatch"].results[len(entry.outputs) :] if v.is_state]
    assert states == list(entry.updates), "what is updated in place is the state itself"


def test_of_a_list_some_are_picked_for_another_call() -> None:
    """The last layer's backward reads no biases, and what it reads is whole still."""
    sharded = FullyShard().run(trained("dense-tiny-sinks"), Report())
    nodes = prepare(InPlace().run(sharded, Report()))["microbatch"].nodes
    (pick,) = (node for node in nodes if node.op == "pick")
    places = pick.attrs["places"]
    readers = [node for node in nodes if node.op == "call" and {*pick.operands, *pick.results} & {*node.operands}]
    assert [node.attrs["callee"] for node in readers] == ["layer.fwd", "layer.bwd"]
    given = pick.operands[0].type.types  # type: ignore[union-attr]
    assert isinstance(places, tuple) and 2 <= len(places) < len(given)
    assert pick.result.type.types == tuple(given[place] for place in places)  # type: ignore[union-attr]


PARTS = """mgraph-ir 1
module "m"

func @g(%a: f32[4], %x: f32[4]) {
  %y: f32[4] = aten.add.Tensor(%a, %x) forward at "" "m.py":1 by capture
  return %y
}

func @f(%x: f32[4], %wide: f32[2, 3, 4]) {
  %part: f32[3, 4] = aten.select.int(%wide) {dim = 0, index = 1} forward at "" "m.py":2 by capture
  %first: f32[4] = aten.select.int(%part) {dim = 0, index = 0} forward at "" "m.py":2 by capture
  %twice: f32[3, 4] = aten.select.int(%wide) {dim = 0, index = 0} forward at "" "m.py":2 by capture
  %given: f32[3, 4] = aten.select.int(%wide) {dim = 0, index = 0} forward at "" "m.py":2 by capture
  %a: f32[4] = aten.exp.default(%x) forward at "" "m.py":3 by capture
  %y: f32[4] = call @g(%first, %a) forward at "" "m.py":4 by capture
  %z: f32[3, 4] = aten.mul.Tensor(%twice, %twice) forward at "" "m.py":5 by capture
  return %y, %z, %given
}

entry f = @f -> (y, z, given)
"""


def test_parts_stand_where_they_are_read() -> None:
    """If that is one place, and one read."""
    nodes = prepare(parse_module(PARTS))["f"].nodes
    assert [n.id for n in nodes] == ["twice", "given", "a", "part", "first", "y", "z"]
