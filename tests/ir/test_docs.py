"""The page on the graph is up to date and its example is valid."""

from __future__ import annotations

import re

from mgraph.ir.docs import PAGE, main, op_table, updated
from mgraph.ir.graph import Phase, StateKind
from mgraph.ir.opdef import declared_ops
from mgraph.ir.parser import parse_module
from mgraph.ir.printer import print_module
from mgraph.ir.types import DType
from mgraph.ir.verifier import RULES, verify


def test_generated_sections_are_up_to_date() -> None:
    page = PAGE.read_text()
    assert updated(page) == page, "run python -m mgraph.ir.docs"
    assert main(["--check"]) == 0


def test_tables_name_every_op_and_rule() -> None:
    page = PAGE.read_text()
    assert all(f"| `{name}` |" in op_table() for name in declared_ops())
    assert all(f"| `{rule.name}` | {rule.says} |" in page for rule in RULES)


def test_the_example_is_valid_and_printed_as_mgraph_prints_it() -> None:
    page = PAGE.read_text()
    (example,) = re.findall(r"```\n(mgraph-ir 1\n.*?)```", page, re.DOTALL)
    module = parse_module(example)
    verify(module)
    assert print_module(module) == example


def test_the_grammar_names_every_word() -> None:
    grammar = PAGE.read_text().split("```")[1]
    for word in [*(d.text for d in DType), *Phase, *StateKind]:
        assert f"'{word}'" in grammar
