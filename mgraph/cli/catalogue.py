"""`mgraph passes` and `mgraph ops`: what there is. The rows of all such tables, in the documentation, too."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from typing import TYPE_CHECKING

from mgraph.cli.table import table
from mgraph.ir.opdef import REQUIRED, declared_ops
from mgraph.ir.printer import attr_text
from mgraph.passes import PASSES, pass_class
from mgraph.passes.base import Pass
from mgraph.passes.spec import print_value
from mgraph.recipe import Recipe, flag_of

if TYPE_CHECKING:
    from mgraph.runtime.options import Settings


def passes() -> None:
    """Write the table of passes, in the order of their stages."""
    sys.stdout.write(table(("pass", "stage", "tier", "options", "what it does"), pass_rows()))


def pass_rows() -> list[tuple[str, str, str, str, str]]:
    """Name, stage, tier, options and meaning of every pass."""
    rows = []
    for name in PASSES:
        found = pass_class(name)
        about = _first_sentence(inspect.getdoc(found) or "")
        rows.append((name, str(found.stage), str(found.tier), _options(found), about))
    return rows


def ops() -> None:
    """Write the table of declared ops."""
    rows = []
    for op in declared_ops().values():
        attrs = [f"{n}!" if d is REQUIRED else f"{n}={attr_text(d)}" for n, d in op.attrs.items()]
        signature = op.signature.text if op.signature is not None else ""
        gradient = "yes" if op.gradient is not None else ""
        rows.append((op.name, signature, " ".join(attrs), gradient, _first_sentence(op.doc)))
    sys.stdout.write(table(("op", "signature", "attributes (! required)", "gradient", "meaning"), rows))


def recipe_rows() -> list[tuple[str, str, str, str, str]]:
    """Flag, field, default, values and meaning of every field of a recipe."""
    rows = []
    for field in dataclasses.fields(Recipe):
        default = "" if field.default in ("", ()) else str(field.default)
        default = default.lower() if isinstance(field.default, bool) else default
        values = "/".join(field.metadata["choices"])
        rows.append((flag_of(field.name), field.name, default, values, field.metadata["help"]))
    return rows


def trainer_rows() -> list[tuple[str, str, str, str]]:
    """Flag, default, values and meaning of every option of a package's `train.py`."""
    from mgraph.runtime.options import Options  # imports torch, which the other tables do without

    return _option_rows(Options)


def serve_rows() -> list[tuple[str, str, str, str]]:
    """Flag, default, values and meaning of every option of a package's `serve.py`."""
    from mgraph.runtime.serving.program import ServeOptions

    return _option_rows(ServeOptions)


def _option_rows(settings: type[Settings]) -> list[tuple[str, str, str, str]]:
    from mgraph.runtime.options import flag_of

    rows = []
    for field in dataclasses.fields(settings):
        default = "" if field.default is None or isinstance(field.default, bool) else str(field.default)
        rows.append((flag_of(field), default, "/".join(field.metadata["choices"] or ()), field.metadata["help"]))
    return rows


def _options(found: type[Pass]) -> str:
    return " ".join(
        f"{f.name}!" if f.default is dataclasses.MISSING else f"{f.name}={print_value(f.default)}"
        for f in dataclasses.fields(found)
    )


def _first_sentence(text: str) -> str:
    line = " ".join(text.strip().split("\n\n")[0].split())
    return line.split(". ")[0].rstrip(".:")
