"""step.py of a package: the whole text."""

from __future__ import annotations

import re
from collections.abc import Iterable

from mgraph.codegen.function_text import FunctionText, StepContext
from mgraph.codegen.kernel_sites import KernelSites
from mgraph.codegen.names import identifier
from mgraph.codegen.prepare import prepare
from mgraph.codegen.source import SourceWriter
from mgraph.codegen.state_tables import SHORT, StateTables
from mgraph.ir.aten import LIBRARIES
from mgraph.ir.graph import Module
from mgraph.ir.local import Division, declared_sizes

Lines = dict[str, dict[str, str]]
"""Of each function of a module: numbers of the lines of step.py, with the node that each was written for."""


def step_text(module: Module, sites: KernelSites | None = None, lines: Lines | None = None) -> str:
    """step.py of a module whose updates of state are in place; `sites` gets the kernel sites that it calls, `lines`
    what was written for which node."""
    functions = prepare(module)
    entry_functions = {entry.function for entry in module.entries.values()}
    names = function_names(module, functions)
    division = Division.of(module, declared_sizes(module))
    pieces = frozenset(piece for entry in module.entries.values() for piece in entry.pieces)
    context = StepContext(functions, names, sites or KernelSites(division=division), StateTables(), division, pieces)
    trainable = [state.name for state in module.state.values() if state.trainable]
    if len(trainable) > SHORT:
        context.tables.add("PARAMETERS", trainable)
    body = SourceWriter()
    for name, function in functions.items():
        if name not in entry_functions:
            body.blank(2)
            FunctionText(function, context, None).write(body)
    for entry in module.entries.values():
        body.blank(2)
        FunctionText(functions[entry.function], context, entry).write(body)
    header = _header(module, context, body.text())
    if lines is not None:
        for line, (of, node) in body.marks.items():
            lines.setdefault(of, {})[str(line + header.count("\n") + 1)] = node
    return header + body.text()


def function_names(module: Module, functions: Iterable[str]) -> dict[str, str]:
    """What each function is called in step.py, apart from the entry functions, which go by their entries."""
    entry_names = {identifier(entry) for entry in module.entries}
    names: dict[str, str] = {}
    for name in functions:
        chosen = identifier(name)
        while chosen in entry_names or chosen in names.values():
            chosen += "_"
        names[name] = chosen
    return names


def _header(module: Module, context: StepContext, body: str) -> str:
    """Docstring, imports and constants; only what the body uses."""

    def uses(name: str) -> bool:
        return re.search(rf"\b{name}\b", body) is not None

    writer = SourceWriter()
    writer.line(f'"""The step of {module.name}, from its graph.')
    writer.blank()
    for entry in module.entries.values():
        function = module.functions[entry.function]
        inputs = ", ".join(["state", *(v.name for v in function.params)])
        writer.line(f"    {entry.name}({inputs}) -> {', '.join(entry.outputs)}")
    writer.blank()
    writer.line("`state` holds every tensor that outlives a call, by name; entries update it in place.")
    writer.line('"""')
    writer.blank()
    writer.line("import torch")
    if uses("F"):
        writer.line("import torch.nn.functional as F")
    writer.line("from torch import Tensor")
    libraries = {name: library for name, library in LIBRARIES.items() if f"torch.ops.{name}." in body}
    runtime = uses("rt") or bool(context.kernels.specs)
    if libraries or runtime:
        writer.blank()
    for name, library in libraries.items():
        writer.line(f"import {library}  # registers torch.ops.{name}")
    if runtime:
        writer.line("from mgraph.runtime import v1 as rt")
    writer.blank()
    writer.line("State = dict[str, Tensor]")
    if context.kernels.specs:
        writer.line("K = rt.kernels(__file__)")
    used = StateTables()
    used.tables = {name: held for name, held in context.tables.tables.items() if uses(name)}
    if used.tables:
        writer.blank()
        used.write(writer)
    return writer.text()
