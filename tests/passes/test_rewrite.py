"""rewrite: where replacements stand, what goes, and what is kept."""

from __future__ import annotations

from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.graph import Value
from mgraph.ir.pattern import Match, capture, op
from mgraph.ir.verifier import verify
from mgraph.passes.base import Report
from mgraph.passes.rewrite import Rule, rewrite
from tests.passes.raising import module_of, ops

TEXT = """
func @f(%x: f32[B, 4]) {
  %a: f32[B, 4] = aten.exp.default(%x)
  %b: f32[B, 4] = aten.neg.default(%a)
  %c: f32[B, 4] = aten.exp.default(%b)
  %d: f32[B, 4] = aten.neg.default(%c)
  return %d
}
"""


def _emit(builder: FunctionBuilder, match: Match) -> tuple[Value, ...]:
    return (builder.one("aten.reciprocal.default", match["x"]),)


RULE = Rule("pair", op("aten.neg.default", op("aten.exp.default", capture("x"))), ("aten.exp.default",), _emit)


def test_chained_matches_read_each_other() -> None:
    module, report = module_of(TEXT), Report()
    after = rewrite(module.functions["f"], (RULE,), "test", report)
    verify(module.with_function(after))
    assert ops(after) == {"aten.reciprocal.default": 2}
    assert after.nodes[1].operands == after.nodes[0].results
    assert [n.origin.line for n in after.nodes] == [2, 4]
    assert {n.made_by for n in after.nodes} == {"test"}
    assert report.counts == {"pair": 2}


def test_nothing_found_is_the_same_function() -> None:
    function = module_of(TEXT.replace("neg", "sin")).functions["f"]
    report = Report()
    assert rewrite(function, (RULE,), "test", report) is function
    assert report.matches == []


def test_one_miss_does_not_stop_the_other() -> None:
    module, report = module_of(TEXT.replace("return %d", "return %d, %a")), Report()
    after = rewrite(module.functions["f"], (RULE,), "test", report)
    assert ops(after) == {"aten.exp.default": 1, "aten.neg.default": 1, "aten.reciprocal.default": 1}
    (miss,) = report.near_misses
    assert (miss.node, miss.pattern, miss.guard) == ("a", "pair", "users")
