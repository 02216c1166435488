"""Diffs name what changed by stable value names, and count ops."""

from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from mgraph.ir.diff import Move, _out_of_order, diff_modules, to_json_text
from mgraph.ir.graph import Module, Phase, StateKind, Value
from mgraph.ir.parser import parse_module
from mgraph.ir.types import DType

HEAD = 'mgraph-ir 1\nmodule "m"\n'
AT = 'forward at "p" "f.py":1 by capture'


def module(*lines: str, more: str = "", returned: str = "%x") -> Module:
    body = "".join(f"  {line} {AT}\n" for line in lines)
    return parse_module(f"{HEAD}{more}func @f(%x: f32[4]) {{\n{body}  return {returned}\n}}\n")


def replace_phase(before: Module, id_: str, phase: Phase) -> Module:
    function = before.functions["f"]
    nodes = tuple(replace(n, phase=phase) if n.id == id_ else n for n in function.nodes)
    return before.with_function(replace(function, nodes=nodes))


def test_equal_modules_have_no_difference(sample: Module, sample_text: str) -> None:
    diff = diff_modules(sample, parse_module(sample_text))
    assert not diff and diff.counts == {"matched": 11, "changed": 0, "moved": 0, "added": 0, "removed": 0}
    assert [f.matched for f in diff.functions] == [5, 6]


def test_ops_are_counted() -> None:
    before = module(*(f"%y{i}: f32[4] = aten.mul.Tensor(%x)" for i in range(12)))
    after = module(*(f"%y{i}: f32[4] = aten.mul.Tensor(%x)" for i in range(8)), "%z: f32[4] = zero(%x)")
    diff = diff_modules(before, after)
    assert diff.ops == {"aten.mul.Tensor": (12, 8), "zero": (0, 1)}
    assert list(diff.functions[0].removed) == ["y8", "y9", "y10", "y11"]
    assert list(diff.functions[0].added) == ["z"]
    assert diff.functions[0].matched == 8


def test_a_changed_node_says_what_changed() -> None:
    before = module("%y: f32[4] = zero(%x)", "%z: f32[4] = aten.add.Tensor(%x, %y) {alpha = 2}")
    after = module("%y: f32[4] = zero(%x)", "%z: f64[4] = aten.sub.Tensor(%y, %y) {alpha = 2.0, beta = 1}")
    (change,) = diff_modules(before, after).functions[0].changed
    assert change.id == "z" and change.parts == {
        "op": ("aten.add.Tensor", "aten.sub.Tensor"),
        "operands": ("%x, %y", "%y, %y"),
        "types": ("f32[4]", "f64[4]"),
        "alpha": ("2", "2.0"),
        "beta": ("absent", "1"),
    }
    assert "aten.add.Tensor" in change.before and "aten.sub.Tensor" in change.after


def test_moved_within_a_function_and_to_another_phase() -> None:
    nodes = [f"%{name}: f32[4] = zero(%x)" for name in "abcd"]
    diff = diff_modules(module(*nodes), module(nodes[3], *nodes[:3]))
    assert diff.functions[0].moved == (Move("d"),)
    assert diff.counts == {"matched": 3, "changed": 0, "moved": 1, "added": 0, "removed": 0}
    later = replace_phase(module(*nodes), "b", Phase.BACKWARD)
    assert diff_modules(module(*nodes), later).functions[0].moved == (Move("b", phase="forward"),)


def test_moved_to_another_function() -> None:
    nodes = [f"%{name}: f32[4] = zero(%x)" for name in "abcd"]
    outlined = f"func @g(%x: f32[4]) {{\n  {nodes[0]} {AT}\n  return %a\n}}\n"
    diff = diff_modules(module(*nodes), module("%n: f32[4] = call @g(%x)", *nodes[1:], more=outlined))
    by_name = {f.name: f for f in diff.functions}
    assert by_name["g"].status == "added" and by_name["g"].moved == (Move("a", "f"),) and not by_name["g"].like
    assert not by_name["f"].removed and list(by_name["f"].added) == ["n"]
    assert by_name["f"].counts == {"matched": 3, "changed": 0, "moved": 0, "added": 1, "removed": 0}
    assert diff.ops == {"call @g": (0, 1), "zero": (4, 4)}


def test_moved_and_changed_is_changed() -> None:
    nodes = ["%a: f32[4] = aten.mul.Tensor(%x) {other = 2}", "%b: f32[4] = zero(%x)"]
    outlined = f"func @g(%z: f32[4]) {{\n  %a: f32[4] = aten.mul.Tensor(%z) {{other = 3}} {AT}\n  return %a\n}}\n"
    diff = diff_modules(module(*nodes), module("%n: f32[4] = call @g(%x)", nodes[1], more=outlined))
    (change,) = next(f for f in diff.functions if f.name == "g").changed
    # The operands have other names in another function; that alone is no change.
    assert change.parts == {"other": ("2", "3"), "function": ("@f", "@g")}


def test_a_function_that_repeats_another_is_compared_with_it() -> None:
    nodes = [f"%{name}: f32[4] = zero(%x)" for name in "abcd"]
    changed = [*nodes[:3], "%d: f32[4] = aten.mul.Tensor(%x) {other = 2}"]
    body = "".join(f"  {line} {AT}\n" for line in changed)
    clone = f"func @f.fwd(%x: f32[4]) {{\n{body}  return %d\n}}\n"
    by_name = {f.name: f for f in diff_modules(module(*nodes), module(*nodes, more=clone)).functions}
    repeated = by_name["f.fwd"]
    assert (repeated.status, repeated.like, by_name["f"].status) == ("added", "f", "same")
    assert repeated.counts == {"matched": 3, "changed": 0, "moved": 0, "added": 1, "removed": 0}
    # Where the first one is gone, what the other repeats of it is not removed.
    gone = parse_module(f"{HEAD}{clone}")
    by_name = {f.name: f for f in diff_modules(module(*nodes), gone).functions}
    assert by_name["f"].status == "removed" and list(by_name["f"].removed) == ["d"]
    # Ids that meet by chance make no repetition.
    strange = f"func @g(%x: f32[4]) {{\n  {nodes[0]} {AT}\n" + "".join(
        f"  %s{i}: f32[4] = zero(%x) {AT}\n" for i in range(9)
    )
    (_, other) = diff_modules(module(*nodes), module(*nodes, more=f"{strange}  return %a\n}}\n")).functions[::-1]
    assert other.like == "" and len(other.added) == 10


def test_declarations_and_signatures(sample: Module) -> None:
    state = dict(sample.state)
    del state["step"]
    state["cache"] = replace(state["cache"], kind=StateKind.BUFFER)
    layer = sample.functions["layer"]
    changed = replace(layer, params=(layer.params[0], Value("cos", layer.params[1].tensor.with_dtype(DType.F64))))
    diff = diff_modules(sample, replace(sample, state=state).with_function(changed))
    assert diff.declarations == {"state": ((), ("step",), ("cache",))}
    assert [f.name for f in diff.functions if f.signature] == ["layer"]


def test_removed_functions_and_json(sample: Module) -> None:
    alone = replace(sample, functions={"layer": sample.functions["layer"]}, entries={})
    diff = diff_modules(sample, alone)
    data = json.loads(to_json_text(diff))
    assert [(f["name"], f["status"]) for f in data["functions"]] == [("layer", "same"), ("main", "removed")]
    assert data["ops"]["call @layer"] == [2, 0]
    assert data["declarations"]["entry"]["removed"] == ["microbatch"]


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
