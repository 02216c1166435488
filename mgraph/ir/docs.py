"""Writes the generated sections of `docs/ir.md`: the tables of ops, of verifier rules, and of what the proof checks.

python -m mgraph.ir.docs          rewrite the sections
python -m mgraph.ir.docs --check  exit 1 where they are out of date
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from mgraph.ir import collective_proof
from mgraph.ir.opdef import REQUIRED, OpDef, declared_ops
from mgraph.ir.printer import attr_text
from mgraph.ir.verifier import RULES

PAGE = Path(__file__).parents[2] / "docs" / "ir.md"


def op_table() -> str:
    """A Markdown table: every declared op with signature, attributes (required ones in bold) and meaning."""
    rows = ["| op | signature | attributes | gradient | meaning |", "|---|---|---|---|---|"]
    rows += [_op_row(op) for op in declared_ops().values()]
    return "\n".join(rows)


def rule_table(rules: Iterable[tuple[str, str]]) -> str:
    """A Markdown table: every rule and what it says, in the order in which they are checked."""
    return "\n".join(["| rule | what it says |", "|---|---|", *(f"| `{name}` | {says} |" for name, says in rules)])


def updated(page: str) -> str:
    """The page with its generated sections, between `<!-- begin NAME -->` and `<!-- end NAME -->`, made anew."""
    rules = rule_table((rule.name, rule.says) for rule in RULES)
    proof = rule_table((name, says) for name, (says, _) in collective_proof.RULES.items())
    for name, text in (("ops", op_table()), ("rules", rules), ("proof", proof)):
        begin, end = f"<!-- begin {name} -->\n", f"\n<!-- end {name} -->"
        assert page.count(begin) == page.count(end) == 1, f"the page needs one section {name!r}"
        before, _, rest = page.partition(begin)
        page = before + begin + text + end + rest.partition(end)[2]
    return page


def main(arguments: list[str]) -> int:
    """Rewrite the page, or with `--check` only compare; the exit code says whether it was (or is now) up to date."""
    page = PAGE.read_text()
    if arguments == ["--check"]:
        return int(updated(page) != page)
    PAGE.write_text(updated(page))
    return 0


def _op_row(op: OpDef) -> str:
    signature = f"`{op.signature.text}`" if op.signature is not None else ""
    attrs = [f"**{n}**" if d is REQUIRED else f"{n} = {attr_text(d)}" for n, d in op.attrs.items()]
    meaning = " ".join(op.doc.split("\n\n")[0].split()).rstrip(":,")
    cells = [f"`{op.name}`", signature, ", ".join(attrs), "yes" if op.gradient is not None else "", meaning]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
