"""The generated tables of docs/cli.md are those of the code."""

from __future__ import annotations

import dataclasses

from mgraph.cli import docs
from mgraph.recipe import Recipe, flag_of


def test_page_is_up_to_date() -> None:
    assert docs.main(["--check"]) == 0, "run: python -m mgraph.cli.docs"


def test_every_field_is_listed() -> None:
    page = docs.PAGE.read_text(encoding="utf-8")
    assert all(f"| `{flag_of(field.name)}` | `{field.name}` |" in page for field in dataclasses.fields(Recipe))
