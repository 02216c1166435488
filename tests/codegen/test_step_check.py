"""step.py issues what the graph does: right texts pass, and each way to differ is named with node and line."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgraph.codegen.step import step_text
from mgraph.codegen.step_check import check_step
from mgraph.errors import PackageError
from mgraph.ir.collective_proof import prove
from mgraph.ir.graph import Module
from mgraph.ir.parser import parse_module
from mgraph.ir.verifier import verify

LAYERS = 4
HEAD = """\
mgraph-ir 1
module "reduced"
dim B 1..
axis tp = 2
axis dp = *
state @grad: f32[6]{dp=P(sum)} = grad transient init [["zeros_"]]

func @layer.fwd(%x: f32[B, 6]) {
  %part: f32[B, 6]{tp=P(sum)} = aten.tanh.default(%x) forward at "layers.*" "model.py":10 by test
  %y: f32[B, 6] = all_reduce(%part) {axis = "tp"} forward at "layers.*" "model.py":11 by test
  return %y
}

func @main(%h_0: f32[B, 6]) {
"""
TAIL = f"""\
  %sum: pending<f32[6]> = all_reduce_start(@grad) {{axis = "dp"}} optimizer at "" "model.py":30 by test
  %total: f32[6] = wait(%sum) optimizer at "" "model.py":30 by test
  %out: f32[B, 6] = aten.mul.Tensor(%h_{LAYERS}, %total) optimizer at "" "model.py":31 by test
  return %out
}}

entry main = @main -> (out)
"""
CALL = '  %h_{1}: f32[B, 6] = call @layer.fwd(%h_{0}) forward at "layers.{0}" "model.py":20 by test\n'


def module() -> Module:
    return parse_module(HEAD + "".join(CALL.format(i, i + 1) for i in range(LAYERS)) + TAIL)


def test_the_emitted_text_passes() -> None:
    text = step_text(module())
    assert f"in range({LAYERS}):" in text  # the calls are a loop there
    check_step(module(), text)


LOOP, LAST = f"in range({LAYERS}):", 'rt.all_reduce_start([state["grad"]], "dp")'
WRONG = {
    "a round too few": (LOOP, f"in range({LAYERS - 1}):", "the graph has what @layer.fwd does, the text all_reduce@dp"),
    "a round too many": (LOOP, f"in range({LAYERS + 1}):", "all_reduce_start over dp, node %sum from model.py:30, the"),
    "another axis": ('"tp")', '"dp")', "all_reduce over tp, node %y from model.py:11, the text all_reduce@dp"),
    "none": (LAST, "None", "node %sum from model.py:30, the text nothing more"),
    "one more": ("return (out,)", f"return ({LAST},)", "the graph has nothing more, the text all_reduce@dp"),
}


@pytest.mark.parametrize("case", WRONG)
def test_another_text_does_not(case: str) -> None:
    old, new, said = WRONG[case]
    text = step_text(module())
    assert text.count(old) == 1
    with pytest.raises(PackageError, match="other collectives than the graph") as caught:
        check_step(module(), text.replace(old, new))
    assert said in caught.value.message


def test_swapped_statements_are_found() -> None:
    """Two reductions that do not depend on each other: torch would run either order, and other ranks hang."""
    two = """\
mgraph-ir 1
module "two"
axis dp = 2
axis tp = 2
state @a: f32[6]{dp=P(sum)} = grad transient init [["zeros_"]]
state @b: f32[6]{tp=P(sum)} = grad transient init [["zeros_"]]

func @main() {
  %p: pending<f32[6]> = all_reduce_start(@a) {axis = "dp"} optimizer at "" "model.py":1 by test
  %q: pending<f32[6]> = all_reduce_start(@b) {axis = "tp"} optimizer at "" "model.py":2 by test
  %x: f32[6] = wait(%p) optimizer at "" "model.py":3 by test
  %y: f32[6] = wait(%q) optimizer at "" "model.py":4 by test
  %z: f32[6] = aten.add.Tensor(%x, %y) optimizer at "" "model.py":5 by test
  return %z
}

entry main = @main -> (z)
"""
    text = step_text(parse_module(two))
    check_step(parse_module(two), text)
    lines = text.splitlines()
    first, second = (i for i, line in enumerate(lines) if "all_reduce_start" in line)
    lines[first], lines[second] = lines[second], lines[first]
    with pytest.raises(PackageError, match=r"all_reduce_start over dp, node %p from .*, the text all_reduce@tp"):
        check_step(parse_module(two), "\n".join(lines))


Program = list[list[tuple[str, int]]]
"""By function: what it does, in order: reduce over axis 0 or 1, start such a reduction, or call an earlier function."""

PARTIAL = "f32[4]{dp=P(sum), tp=P(sum)}"
LEFT = {"dp": "f32[4]{tp=P(sum)}", "tp": "f32[4]{dp=P(sum)}"}


@st.composite
def programs(draw: st.DrawFn) -> Program:
    made: Program = []
    for number in range(draw(st.integers(1, 3))):
        kinds = ["reduce", "start", *(["call", "calls"] if number else [])]
        step = st.tuples(st.sampled_from(kinds), st.integers(0, 1))
        made.append(draw(st.lists(step, min_size=1, max_size=5)))
    return made


def program_text(program: Program) -> str:
    """The module: every value feeds the next, started reductions are ended at the end of their function."""
    by = 'forward at "" "model.py":1 by test'
    lines = ['mgraph-ir 1\nmodule "random"\naxis dp = 2\naxis tp = 2\n']
    for number, steps in enumerate(program):
        lines.append(f"func @f{number}(%x_0: {PARTIAL}) {{")
        count, waits = 0, []
        for kind, choice in steps:
            axis = ("dp", "tp")[choice]
            for _ in range(3 if kind == "calls" else 1):
                before, after = f"%x_{count}", f"%x_{count + 1}"
                if kind in ("call", "calls"):
                    lines.append(f"  {after}: {PARTIAL} = call @f{choice % number}({before}) {by}")
                else:
                    lines.append(f"  %t_{count}: {PARTIAL} = aten.tanh.default({before}) {by}")
                    if kind == "start":
                        pending = f"pending<{LEFT[axis]}>"
                        lines.append(f'  %p_{count}: {pending} = all_reduce_start(%t_{count}) {{axis = "{axis}"}} {by}')
                        waits.append((count, LEFT[axis]))
                    else:
                        lines.append(f'  %r_{count}: {LEFT[axis]} = all_reduce(%t_{count}) {{axis = "{axis}"}} {by}')
                    read = before if kind == "start" else f"%r_{count}"
                    lines.append(f"  {after}: {PARTIAL} = aten.neg.default({read}) {by}")
                count += 1
        for place, type_ in waits:
            lines.append(f"  %w_{place}: {type_} = wait(%p_{place}) {by}")
            lines.append(f"  %x_{count + 1}: {PARTIAL} = aten.mul.Tensor(%x_{count}, %w_{place}) {by}")
            count += 1
        lines.append(f"  return %x_{count}\n}}\n")
    return "\n".join(lines) + f"\nentry main = @f{len(program) - 1} -> (x)\n"


@settings(max_examples=40, deadline=None)
@given(programs())
def test_emission_keeps_the_order_of_any_program(program: Program) -> None:
    """The text passes; with one collective doubled, or over the other axis, it does not."""
    module = parse_module(program_text(program))
    verify(module)
    prove(module)
    text = step_text(module)
    check_step(module, text)
    lines = text.splitlines()
    issued = [i for i, line in enumerate(lines) if "rt.all_reduce" in line]
    for place in issued[:2]:
        other = lines[place].replace('"dp"', '"no"').replace('"tp"', '"dp"').replace('"no"', '"tp"')
        with pytest.raises(PackageError, match="other collectives"):
            check_step(module, "\n".join([*lines[:place], other, *lines[place + 1 :]]))
        with pytest.raises(PackageError, match="other collectives"):
            check_step(module, "\n".join([*lines[:place], lines[place], *lines[place:]]))
