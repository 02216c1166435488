"""Errors of the parser: message, line, column, caret, nearest name."""

from __future__ import annotations

import pytest

from mgraph.errors import GraphError
from mgraph.ir.parser import parse_module

HEAD = 'mgraph-ir 1\nmodule "m"\n'
FUNCTION = """\
func @f(%x: f32[B, 4], %other: f32[B, 4]) {
  %y: f32[B, 4] = zero(%x) {a = 1} forward at "p" "f.py":3 by p
  return %y
}
"""


def changed(old: str, new: str) -> str:
    assert FUNCTION.count(old) == 1
    return HEAD + FUNCTION.replace(old, new)


CASES = [
    # text, message, line, column, part of the hint
    ("", "the first line must be 'mgraph-ir 1'", 1, 1, ""),
    ("mgraph-ir 2\n", "the first line must be 'mgraph-ir 1'", 1, 1, ""),
    ("mgraph-ir 1\n", 'expected a line `module "name"`', 1, 1, ""),
    (HEAD + "modul x\n", "unknown statement 'modul'", 3, 1, "did you mean 'module'?"),
    (HEAD + "dim B 1\n", "expected '..'", 3, 8, ""),
    (HEAD + "dim B 1..\ndim B 1..\n", "dim 'B' is declared twice", 4, 5, ""),
    (HEAD + "dim R 0.. ragged <= 2*$ by bound\n", "not a dimension expression", 3, 21, ""),
    (HEAD + "dim R 0.. ragged <= 2 by bond\n", "unknown way to know an extent 'bond'", 3, 26, "did you mean 'bound'?"),
    (HEAD + "axis dp = +\n", "expected '*', a size or a product", 3, 11, ""),
    (HEAD + "state @a: f32[4] = parm\n", "unknown kind of state 'parm'", 3, 20, "did you mean 'param'?"),
    (HEAD + "state @a: pending<f32[4]> = param\n", "never pending", 3, 11, ""),
    (HEAD + "state @a: f32[4] = param init 3\n", "an initialiser is a list of calls", 3, 31, ""),
    (HEAD + "state @a: f32[4] = param extra\n", "the line should end here", 3, 26, ""),
    (HEAD + "state @a.{3..1}.b: f32[4] = param\n", "the range counts down", 3, 11, ""),
    (HEAD + "state @a: f33[4] = param\n", "unknown dtype 'f33'", 3, 11, "did you mean 'f32'?"),
    (HEAD + "state @a: f32[1/2] = param\n", "not a whole number: '1/2'", 3, 15, ""),
    (HEAD + "state @a: f32[4]{dp=X} = param\n", "expected a placement", 3, 21, ""),
    (HEAD + 'fact "a\\q"\n', "not a string", 3, 6, ""),
    (HEAD + "entry e = @f -> ()\n", "unknown function 'f'", 3, 11, ""),
    (HEAD + FUNCTION + "entry e = @ff -> ()\n", "unknown function 'ff'", 7, 11, "did you mean 'f'?"),
    (HEAD + FUNCTION + "entry e = @f -> () pieces (@ff)\n", "unknown function 'ff'", 7, 28, "did you mean 'f'?"),
    (changed("}\n", ""), "function 'f' has no closing '}'", 3, 1, ""),
    (changed("  return %y\n", ""), "function 'f' has no `return`", 5, 1, ""),
    (changed("return %y", "return %yy"), "unknown value 'yy'", 5, 10, "did you mean 'y'?"),
    (changed("return %y", "return @yy"), "unknown state 'yy'", 5, 10, ""),
    (changed("return %y\n", "return %y\n  return %y\n"), "only '}' may follow `return`", 6, 3, ""),
    (changed("zero(%x)", "zero(%othr)"), "unknown value 'othr'", 4, 24, "did you mean 'other'?"),
    (changed("zero(%x)", "zero(%y)"), "unknown value 'y'", 4, 24, ""),
    (changed("zero(%x)", "zero(%x"), "expected ','", 4, 27, ""),
    (changed("zero(%x)", "call @g(%x)"), "unknown function 'g'", 4, 24, "one of f"),
    (changed("  %y:", "  %x:"), "value %x is defined twice", 4, 3, ""),
    (changed("  %y: f32[B, 4] =", "  %y ="), "expected ':'", 4, 6, ""),
    (changed("{a = 1}", "{a = 1, a = 2}"), "attribute 'a' is given twice", 4, 36, ""),
    (changed("{a = 1}", "{a = 1+}"), "not a dimension expression", 4, 33, ""),
    (changed("{a = 1}", "{a = [1, 2}"), "expected ',' or ']'", 4, 38, ""),
    (changed("forward", "forwards"), "unknown phase 'forwards'", 4, 36, "did you mean 'forward'?"),
    (changed(" by p", ""), "expected 'by'", 4, 59, ""),
    (changed("zero(%x)", "call @f(%x)").replace("  %y: f32[B, 4] =", "  %y ="), "calls itself", 3, 1, ""),
]


@pytest.mark.parametrize(("text", "message", "line", "column", "hint"), CASES)
def test_an_error_has_line_column_and_caret(text: str, message: str, line: int, column: int, hint: str) -> None:
    with pytest.raises(GraphError) as caught:
        parse_module(text, "a.mg")
    rows = str(caught.value).splitlines()
    assert message in rows[0]
    assert rows[1] == f"  at a.mg, line {line}, column {column}"
    lines = text.splitlines()
    assert rows[2] == "    " + (lines[line - 1] if lines else "")
    assert rows[3] == " " * (3 + column) + "^"
    assert hint in str(caught.value)


def test_the_shown_part_of_a_long_line_is_short() -> None:
    operands = ", ".join(["%x"] * 5000)
    with pytest.raises(GraphError) as caught:
        parse_module(changed("zero(%x)", f"zero({operands}, %z)"))
    text = str(caught.value)
    assert len(text) < 500
    rows = text.splitlines()
    assert rows[2][rows[3].index("^") :].startswith("%z)")


def test_no_hint_lists_thousands_of_names() -> None:
    states = "".join(f"state @layers.{i}.w: f32[4] = param\n" for i in range(2000))
    with pytest.raises(GraphError) as caught:
        parse_module(HEAD + states + FUNCTION.replace("zero(%x)", "zero(@completely_else)"))
    assert caught.value.hint is None


def test_a_call_with_another_number_of_results() -> None:
    other = "func @g(%x: f32[B, 4]) {\n  return %x, %x\n}\n"
    with pytest.raises(GraphError, match="the call has 1 results, but 'g' returns 2"):
        parse_module(changed("zero(%x)", "call @g(%x)").replace("  %y: f32[B, 4] =", "  %y =") + other)


def test_comments_blank_lines_and_blanks_mean_nothing() -> None:
    text = '# made by dce\n\nmgraph-ir 1\n\nmodule  "m"\n# dims\ndim B 1 ..\n' + FUNCTION.replace("{a = 1}", "{ a=1 }")
    module = parse_module(text.replace("  return", "  # the end\n\n  return"))
    assert module.functions["f"].nodes[0].attrs == {"a": 1}


def test_a_range_unfolds_everywhere_in_its_line() -> None:
    text = HEAD + 'state @l.{1..2}.a: f32[4] = master seed s.{1..2} init [["copy_from", "l.{1..2}.b"]]\n'
    text += 'state @l.{1..2}.b: f32[4] = param init [["fill_", 2]]\n'
    text += 'state @c: f32[4] = param init [["copy_from", "{1..2}"]]\n'
    module = parse_module(text)
    assert list(module.state) == ["l.1.a", "l.1.b", "l.2.a", "l.2.b", "c"]
    assert module.state["l.2.a"].seed_name == "s.2" and module.state["l.2.a"].init == (("copy_from", "l.2.b"),)
    assert module.state["c"].init == (("copy_from", "{1..2}"),) and module.state["c"].seed_name == "c"
