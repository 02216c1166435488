"""Writes the generated tables of `docs/cli.md`: verbs, recipe fields, options of `train.py` and `serve.py`, passes.

python -m mgraph.cli.docs          rewrite the tables
python -m mgraph.cli.docs --check  exit 1 where they are out of date
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from mgraph.cli.app import command
from mgraph.cli.catalogue import pass_rows, recipe_rows, serve_rows, trainer_rows
from mgraph.recipe import Recipe

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def updated(page: str) -> str:
    """The page with its tables, between `<!-- begin NAME -->` and `<!-- end NAME -->`, made anew."""
    tables = {
        "verbs": verbs(),
        "recipe": recipe(),
        "trainer": options(trainer_rows()),
        "serve": options(serve_rows()),
        "passes": passes(),
    }
    for name, text in tables.items():
        begin, end = f"<!-- begin {name} -->\n", f"\n<!-- end {name} -->"
        assert page.count(begin) == page.count(end) == 1, f"the page needs one section {name!r}"
        before, _, rest = page.partition(begin)
        page = before + begin + text + end + rest.partition(end)[2]
    return page


def verbs() -> str:
    """Every verb with its arguments and flags, those of a recipe left to their own table."""
    fields = {field.name for field in dataclasses.fields(Recipe)} - {"model"}
    rows = []
    for name, verb in command().commands.items():
        words = [f"mgraph {name}"]
        for item in verb.params:
            if item.name in fields and name == "compile":
                continue
            flag = " ".join(sorted(item.opts, key=len)[:1])
            words.append(f"[{flag}]" if flag.startswith("-") else item.metavar)
        rows.append((f"`{' '.join(words)}`", verb.help))
    return _table(("verb", "what it does"), rows)


def recipe() -> str:
    """Every field of a recipe with its flag, default and values."""
    rows = [(_code(flag), _code(name), _code(default), *rest) for flag, name, default, *rest in recipe_rows()]
    return _table(("flag", "field", "default", "values", "meaning"), rows)


def options(rows: Iterable[tuple[str, str, str, str]]) -> str:
    """Every option of a package's program."""
    coded = [(_code(flag), _code(default), *rest) for flag, default, *rest in rows]
    return _table(("flag", "default", "values", "meaning"), coded)


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def passes() -> str:
    """Every pass with its stage, tier and options."""
    rows = [(f"`{name}`", stage, tier, options, about) for name, stage, tier, options, about in pass_rows()]
    return _table(("pass", "stage", "tier", "options", "what it does"), rows)


def main(arguments: list[str]) -> int:
    """Rewrite the page, or with `--check` only compare; the exit code says whether it was (or is now) up to date."""
    page = PAGE.read_text(encoding="utf-8")
    if arguments == ["--check"]:
        return int(updated(page) != page)
    PAGE.write_text(updated(page), encoding="utf-8")
    return 0


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
