"""The text of a diff: totals, each class under its sign, and lists that stay short."""

from __future__ import annotations

from dataclasses import replace

from mgraph.ir.diff import diff_modules
from mgraph.ir.diff_text import diff_text
from mgraph.ir.graph import Module, StateKind
from mgraph.ir.parser import parse_module

from .test_diff import AT, module

NODES = [f"%{name}: f32[4] = zero(%x)" for name in "abcd"]


def test_no_difference(sample: Module, sample_text: str) -> None:
    assert diff_text(diff_modules(sample, parse_module(sample_text))) == "no difference\n"


def test_all_five_classes() -> None:
    outlined = f"func @g(%x: f32[4]) {{\n  {NODES[0]} {AT}\n  return %a\n}}\n"
    changed = "%c: f32[4] = aten.mul.Tensor(%b) {other = 2}"
    after = module("%n: f32[4] = call @g(%x)", NODES[1], changed, more=outlined)
    assert diff_text(diff_modules(module(*NODES), after)).splitlines() == [
        "1 node matched, 1 changed, 1 moved, 1 added, 1 removed",
        "aten.mul.Tensor: 0 -> 1 (+1)",
        "call @g: 0 -> 1 (+1)",
        "zero: 4 -> 2 (-2)",
        "",
        "func @g: added; 0 nodes matched, 1 moved",
        "  zero: 0 -> 1 (+1)",
        "  > 1 node moved here from @f: %a",
        "",
        "func @f: changed; 1 node matched, 1 changed, 1 added, 1 removed",
        "  aten.mul.Tensor: 0 -> 1 (+1)",
        "  call @g: 0 -> 1 (+1)",
        "  zero: 4 -> 1 (-3)",
        "  ~ %c aten.mul.Tensor: op zero -> aten.mul.Tensor; operands %x -> %b; other absent -> 2",
        '  + %n = call @g(%x) forward at "p" "f.py":1 by capture',
        '  - %d: f32[4] = zero(%x) forward at "p" "f.py":1 by capture',
    ]


def test_order_and_likeness() -> None:
    text = diff_text(diff_modules(module(*NODES), module(NODES[3], *NODES[:3])))
    assert "  > 1 node moved to another place in the order: %d" in text.splitlines()
    clone = "func @f.fwd(%x: f32[4]) {\n" + "".join(f"  {line} {AT}\n" for line in NODES) + "  return %x\n}\n"
    text = diff_text(diff_modules(module(*NODES), module(*NODES, more=clone)))
    assert text.splitlines()[-1] == "func @f.fwd: added, like @f; 4 nodes matched"


def test_declarations(sample: Module) -> None:
    state = dict(sample.state)
    del state["step"]
    state["cache"] = replace(state["cache"], kind=StateKind.BUFFER)
    lines = diff_text(diff_modules(sample, replace(sample, state=state))).splitlines()
    assert "- state @step" in lines and "~ state @cache" in lines


def test_long_lists_and_lines_are_cut() -> None:
    many = module(*(f"%y{i}: f32[4] = zero(%x)" for i in range(50)))
    text = diff_text(diff_modules(module(), many), limit=5)
    assert "  + … and 45 more" in text.splitlines() and text.count("zero(") == 5
    wide = [module(f"%y: f32[4] = aten.sum.dim_IntList(%x) {{dim = [{n}, {'1, ' * 200}1]}}") for n in (1, 2)]
    (line,) = [x for x in diff_text(diff_modules(*wide)).splitlines() if x.startswith("  ~ ")]
    assert line.startswith("  ~ %y aten.sum.dim_IntList: dim [1, 1, 1") and len(line) < 400 and line.count("…") == 2
