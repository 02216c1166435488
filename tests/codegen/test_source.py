"""The line breaker and the writer."""

from __future__ import annotations

from mgraph.codegen.source import SourceWriter, brackets, broken, split_commas


def test_short_lines_stay() -> None:
    assert broken("x = f(a, b)", "    ") == ["    x = f(a, b)"]


def test_call_content_moves_to_one_line() -> None:
    arguments = ", ".join(["argument"] * 11)
    assert broken(f"result = function({arguments})", "") == ["result = function(", f"    {arguments}", ")"]


def test_long_calls_and_literals_take_a_line_per_element() -> None:
    arguments = ", ".join(["argument"] * 14)
    assert broken(f"f({arguments})", "") == ["f(", *["    argument,"] * 14, ")"]
    assert broken(f"return a, [{', '.join(['argument'] * 13)}]", "")[1:] == [*["    argument,"] * 13, "]"]


def test_what_follows_a_long_call_stays_behind_it() -> None:
    arguments = ", ".join(["argument"] * 11)
    assert broken(f"result = function({arguments})[-1][0]", "") == [
        "result = function(",
        f"    {arguments}",
        ")[-1][0]",
    ]


def test_brackets_in_strings_do_not_count() -> None:
    assert brackets('f("(", a)[0]') == [(1, 8), (9, 11)]
    assert split_commas('a, f(b, c), "x, y", [d, e],') == ["a", "f(b, c)", '"x, y"', "[d, e]"]
    assert brackets("f()") == []


def test_writer() -> None:
    writer, inner = SourceWriter(), SourceWriter(depth=1)
    writer.line("def f():")
    with writer.indented():
        writer.line("return 1")
    inner.line("# pasted")
    writer.blank()
    writer.paste(inner)
    assert writer.text() == "def f():\n    return 1\n\n    # pasted\n"
