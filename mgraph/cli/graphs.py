"""`mgraph dump` and `mgraph diff`: the graphs of a package."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from mgraph.cli.snapshots import open_package
from mgraph.errors import OptionError, did_you_mean
from mgraph.ir.graph import Module

DUMP_FORMATS = ("text", "json", "dot", "svg", "html")
DIFF_FORMATS = ("text", "json")


def dump(path: Path, wanted: str, function: str, form: str) -> None:
    """Write the graph after a pass to stdout, whole or one function of it. SVG draws one function."""
    check_format(form, DUMP_FORMATS)
    snapshot = open_package(path).snapshot(wanted)
    if form == "text" and not function:
        sys.stdout.write(snapshot.text)
        return
    module = snapshot.module
    if function and function not in module.functions:
        hint = did_you_mean(function, module.functions)
        raise OptionError(f"the graph has no function '{function}'", f"--fn, after pass {snapshot.title}", hint)
    if form == "svg" and not function:
        raise OptionError("svg draws one function", "--fn", f"one of {', '.join(module.functions)}")
    sys.stdout.write(_written(module, function, form))


def _written(module: Module, function: str, form: str) -> str:
    from mgraph.ir.draw import to_dot, to_html, to_svg
    from mgraph.ir.json_form import function_to_json, module_to_json
    from mgraph.ir.printer import print_function

    if form == "text":
        return print_function(module.functions[function], module.functions)
    if form == "json":
        data = function_to_json(module.functions[function]) if function else module_to_json(module)
        return json.dumps(data, indent=1) + "\n"
    if form == "dot":
        return to_dot(module, function or None)
    if form == "svg":
        return to_svg(module, function) + "\n"
    return to_html(
        dataclasses.replace(module, functions={function: module.functions[function]}) if function else module
    )


def diff(path: Path, first: str, second: str, form: str, limit: int) -> None:
    """Write what changed between two graphs to stdout."""
    from mgraph.ir.diff import diff_modules, to_json_text
    from mgraph.ir.diff_text import diff_text

    check_format(form, DIFF_FORMATS)
    package = open_package(path)
    if first and not second:
        after = package.snapshot(first)
        before = package.before(after)
    else:
        before, after = package.snapshot(first or "0"), package.snapshot(second)
    if form == "text":
        sys.stdout.write(f"# {before.title} -> {after.title}\n")
    found = diff_modules(before.module, after.module)
    sys.stdout.write(to_json_text(found) if form == "json" else diff_text(found, limit))


def check_format(form: str, known: tuple[str, ...]) -> None:
    """Raise OptionError for a `--format` that is not one of those known."""
    if form not in known:
        raise OptionError(f"unknown format '{form}'", "--format", did_you_mean(form, known))
