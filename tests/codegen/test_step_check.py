"""step.py issues what the graph does: right texts pass, and each way to differ is named with node and line."""

from __future__ import annotations

import pytest

from mgraph.codegen.step import step_text
from mgraph.codegen.step_check import check_step
from mgraph.errors import PackageError
from mgraph.ir.graph import Module
from mgraph.ir.parser import parse_module

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
