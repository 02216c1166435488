"""Aliases, last uses, inlining and what may be overwritten."""

from __future__ import annotations

import pytest

from mgraph.codegen.liveness import Liveness, is_small, may_alias, written_operands
from mgraph.ir.graph import Node, Value
from mgraph.ir.parser import parse_module
from mgraph.ir.types import DType, TensorType

TEXT = """mgraph-ir 1
module "m"

func @f(%x: f32[64, 64]) {
  %a: f32[64, 64] = aten.exp.default(%x) forward at "" "m.py":1 by capture
  %t: f32[64, 64] = aten.t.default(%a) forward at "" "m.py":2 by capture
  %b: f32[64, 64] = aten.sin.default(%a) forward at "" "m.py":3 by capture
  %c: f32[64, 64] = aten.mm.default(%t, %b) forward at "" "m.py":4 by capture
  %e: f32[2, 64, 64] = aten.expand.default(%c) {size = [2, 64, 64]} forward at "" "m.py":5 by capture
  %g: f32[2, 64, 64] = aten.neg.default(%e) forward at "" "m.py":6 by capture
  return %g
}

entry f = @f -> (g)
"""


def test_facts_of_a_function() -> None:
    function = parse_module(TEXT).functions["f"]
    values = {v.name: v for n in function.nodes for v in n.results}
    live = Liveness(function, {}, lambda node, total: False, {})
    assert {v.name for v in live.inlined} == {"t", "e"}
    # The inlined view stands in the product, so `a` is read there.
    assert live.last_use[values["a"]] == 3
    assert [v.name for v in live.reads(function.nodes[3])] == ["a", "b"]
    assert not live.can_overwrite(values["a"], 2) and live.can_overwrite(values["b"], 3)
    assert not live.can_overwrite(function.params[0], 0)
    assert not live.can_overwrite(values["c"], 5), "an expanded tensor shares its elements"
    assert live.last_use[values["g"]] == len(function.nodes)


@pytest.mark.parametrize(
    ("op", "aliases"),
    [("aten.view.default", True), ("reshape", True), ("aten.add.Tensor", False), ("aten.einsum.default", True),
     ("aten.linear.default", False), ("rms_norm", False)],
)  # fmt: skip
def test_may_alias(op: str, aliases: bool) -> None:
    assert may_alias(op) is aliases


def test_written_operands() -> None:
    x = Value("x", TensorType(DType.F32, (2,)))
    ops = {"zero_": 1, "zero": 0, "aten.add_.Tensor": 1, "all_reduce": 1, "wait": 0}
    assert {op: written_operands(Node(op, (x,), (x,))) for op in ops} == ops
    assert written_operands(Node("aten.__and__.Tensor", (x,), (x,))) == 0


def test_is_small() -> None:
    assert is_small(Value("x", TensorType(DType.F32, (4, 4))))
    assert not is_small(Value("x", TensorType(DType.F32, (400, 400))))
