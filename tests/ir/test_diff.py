"""Diffs name what changed by stable value names, and count ops."""

from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from mgraph.ir.diff import _out_of_order, diff_modules, to_json_text
from mgraph.ir.graph import Module, StateKind, Value
from mgraph.ir.parser import parse_module
from mgraph.ir.types import DType

HEAD = 'mgraph-ir 1\nmodule "m"\n'
AT = 'forward at "p" "f.py":1 by capture'


def module(*lines: str, more: str = "", returned: str = "%x") -> Module:
    body = "".join(f"  {line} {AT}\n" for line in lines)
    return parse_module(f"{HEAD}{more}func @f(%x: f32[4]) {{\n{body}  return {returned}\n}}\n")


def test_equal_modules_have_no_difference(sample: Module, sample_text: str) -> None:
    diff = diff_modules(sample, parse_module(sample_text))
    assert not diff and diff.text() == "no difference\n"
    assert [f.matched for f in diff.functions] == [5, 6]


def test_ops_are_counted() -> None:
    before = module(*(f"%y{i}: f32[4] = aten.mul.Tensor(%x)" for i in range(12)))
    after = module(*(f"%y{i}: f32[4] = aten.mul.Tensor(%x)" for i in range(8)), "%z: f32[4] = zero(%x)")
    diff = diff_modules(before, after)
    assert diff.ops == {"aten.mul.Tensor": (12, 8), "zero": (0, 1)}
    lines = diff.text().splitlines()
    assert lines[:2] == ["aten.mul.Tensor: 12 -> 8 (-4)", "zero: 0 -> 1 (+1)"]
    assert list(diff.functions[0].removed) == ["y8", "y9", "y10", "y11"]
    assert list(diff.functions[0].added) == ["z"]
    assert diff.functions[0].matched == 8


def test_a_changed_node_says_what_changed() -> None:
    before = module("%y: f32[4] = zero(%x)", "%z: f32[4] = aten.add.Tensor(%x, %y) {alpha = 2}")
    after = module("%y: f32[4] = zero(%x)", "%z: f64[4] = aten.sub.Tensor(%y, %y) {alpha = 2.0, beta = 1}")
    (change,) = diff_modules(before, after).functions[0].changed
    assert change.id == "z" and change.what == ("op", "operands", "results", "alpha", "beta")
    assert "aten.add.Tensor" in change.before and "aten.sub.Tensor" in change.after


def test_moved_within_and_between_functions() -> None:
    nodes = [f"%{name}: f32[4] = zero(%x)" for name in "abcd"]
    diff = diff_modules(module(*nodes), module(nodes[3], *nodes[:3]))
    assert [m.id for m in diff.functions[0].moved] == ["d"]
    assert diff.functions[0].matched == 4 and "> %d moved" in diff.text()

    outlined = f"func @g(%x: f32[4]) {{\n  {nodes[0]} {AT}\n  return %a\n}}\n"
    diff = diff_modules(module(*nodes), module("%n: f32[4] = call @g(%x)", *nodes[1:], more=outlined))
    by_name = {f.name: f for f in diff.functions}
    assert by_name["g"].status == "added" and by_name["g"].moved[0].function == "f"
    assert not by_name["f"].removed and list(by_name["f"].added) == ["n"]
    assert diff.ops == {"call @g": (0, 1), "zero": (4, 4)}


def test_declarations_and_signatures(sample: Module) -> None:
    state = dict(sample.state)
    del state["step"]
    state["cache"] = replace(state["cache"], kind=StateKind.BUFFER)
    layer = sample.functions["layer"]
    changed = replace(layer, params=(layer.params[0], Value("cos", layer.params[1].tensor.with_dtype(DType.F64))))
    diff = diff_modules(sample, replace(sample, state=state).with_function(changed))
    assert diff.declarations == {"state": ((), ("step",), ("cache",))}
    assert [f.name for f in diff.functions if f.signature] == ["layer"]
    assert "- state @step" in diff.text() and "~ state @cache" in diff.text()


def test_removed_functions_and_json(sample: Module) -> None:
    alone = replace(sample, functions={"layer": sample.functions["layer"]}, entries={})
    diff = diff_modules(sample, alone)
    data = json.loads(to_json_text(diff))
    assert [(f["name"], f["status"]) for f in data["functions"]] == [("layer", "same"), ("main", "removed")]
    assert data["ops"]["call @layer"] == [2, 0]
    assert data["declarations"]["entry"]["removed"] == ["microbatch"]


def test_long_lists_are_cut() -> None:
    many = module(*(f"%y{i}: f32[4] = zero(%x)" for i in range(50)))
    text = diff_modules(module(), many).text(limit=5)
    assert "+ … and 45 more" in text and text.count("zero(") == 5


@settings(deadline=None)
@given(st.permutations(range(9)))
def test_what_is_not_moved_keeps_its_order_and_is_most(order: list[int]) -> None:
    names = [str(i) for i in range(9)]
    moved = _out_of_order([names[i] for i in order], names)
    kept = [i for i in order if names[i] not in moved]
    assert kept == sorted(kept)
    # The longest increasing subsequence, by the quadratic recurrence.
    best: list[int] = []
    for at, value in enumerate(order):
        best.append(1 + max((best[q] for q in range(at) if order[q] < value), default=0))
    assert len(kept) == max(best)
