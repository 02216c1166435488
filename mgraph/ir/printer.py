"""Module -> text, deterministic, one line per node; `mgraph.ir.parser` reads it back to an equal module.

The grammar is the first thing in `docs/ir.md`. Names that are not plain words are written as JSON strings; attributes
are sorted; states and updates whose names count up are folded (`mgraph.ir.fold`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import sympy

from mgraph.ir.changes import unchanged_functions
from mgraph.ir.dims import NamedDim, dim_text
from mgraph.ir.fold import Run, fold, template
from mgraph.ir.graph import AttrValue, Axis, Entry, Function, Module, Node, Origin, State, Static, Value
from mgraph.ir.types import DType

HEADER = "mgraph-ir 1"
BARE = r"[A-Za-z0-9_.]+(?:-[A-Za-z0-9_.]+)*"
_IS_BARE = re.compile(BARE).fullmatch

NO_FUNCTIONS: Mapping[str, Function] = {}


@dataclass(frozen=True, slots=True)
class Printed:
    """A module with the text of its parts: the next module, which shares most of them, is printed from it."""

    module: Module
    state: str
    functions: Mapping[str, str]
    entries: Mapping[str, str]

    @property
    def text(self) -> str:
        """The whole module as text, ending in a newline."""
        module = self.module
        lines = [HEADER, f"module {json.dumps(module.name)}"]
        lines += [_dim_line(dim) for dim in module.dims.values()]
        lines += [_axis_line(axis) for axis in module.mesh]
        lines += [f"fact {json.dumps(fact.text)}{' proved' if fact.proved else ''}" for fact in module.facts]
        lines += [self.state] if self.state else []
        for text in self.functions.values():
            lines += ["", text]
        if module.entries:
            lines.append("")
        lines += self.entries.values()
        return "\n".join(lines) + "\n"


def print_parts(module: Module, known: Printed | None = None) -> Printed:
    """The text of a module by parts; those that are as in `known` are taken from it."""
    same = unchanged_functions(module, known.module) if known is not None else set[str]()
    functions = {
        name: known.functions[name]
        if known is not None and name in same
        else "\n".join(function_lines(function, module.functions))
        for name, function in module.functions.items()
    }
    entries = {
        name: known.entries[name]
        if known is not None and known.module.entries.get(name) is entry
        else _entry_line(entry)
        for name, entry in module.entries.items()
    }
    same_state = known is not None and _same_state(module.state, known.module.state)
    state = known.state if known is not None and same_state else "\n".join(_state_lines(module.state))
    return Printed(module, state, functions, entries)


def _same_state(a: Mapping[str, State], b: Mapping[str, State]) -> bool:
    return a is b or (len(a) == len(b) and all(x is y for x, y in zip(a.values(), b.values(), strict=True)))


def print_module(module: Module) -> str:
    """The whole module as text, ending in a newline."""
    return print_parts(module).text


def print_function(function: Function, functions: Mapping[str, Function] = NO_FUNCTIONS) -> str:
    """One function as text. `functions` are the module's: calls then leave out types that the callee gives."""
    return "\n".join(function_lines(function, functions)) + "\n"


def function_lines(function: Function, functions: Mapping[str, Function] = NO_FUNCTIONS) -> list[str]:
    """The lines of a function: header, one per node, `return`, closing brace."""
    returned = ", ".join(map(reference, function.results))
    return [
        header_text(function),
        *(f"  {node_text(node, functions)}" for node in function.nodes),
        f"  return {returned}".rstrip(),
        "}",
    ]


def header_text(function: Function) -> str:
    """`func @layer(%x: f32[B]; %weight: f32[64]) static (window) {`"""
    inputs = ", ".join(map(_typed, function.params))
    if function.slots:
        inputs += "; " + ", ".join(map(_typed, function.slots))
    statics = f" static ({', '.join(map(name_text, function.statics))})" if function.statics else ""
    return f"func @{name_text(function.name)}({inputs}){statics} {{"


def node_text(node: Node, functions: Mapping[str, Function] = NO_FUNCTIONS) -> str:
    """One node as text."""
    callee = callee_of(node)
    target = functions.get(callee) if callee is not None else None
    given = target is not None and [v.type for v in target.results] == [v.type for v in node.results]
    results = ", ".join(map(reference if given else _typed, node.results))
    split = len(target.params) if target is not None and target.slots else len(node.operands)
    operands = ", ".join(map(reference, node.operands[:split]))
    if split < len(node.operands):
        operands += "; " + ", ".join(map(reference, node.operands[split:]))
    op = node.op if callee is None else f"call @{name_text(callee)}"
    shown = sorted((k, v) for k, v in node.attrs.items() if callee is None or k != "callee")
    attrs = " {" + ", ".join(f"{name_text(k)} = {attr_text(v)}" for k, v in shown) + "}" if shown else ""
    tail = f"{node.phase}{_origin_text(node.origin)} by {name_text(node.made_by)}"
    return f"{results} = {op}({operands}){attrs} {tail}"


def callee_of(node: Node) -> str | None:
    """The name of the function that a `call` node calls; `None` for every other node."""
    callee = node.attrs.get("callee")
    return callee if node.op == "call" and isinstance(callee, str) else None


@lru_cache(maxsize=65536)
def name_text(name: str) -> str:
    """A name, as a JSON string unless it is a plain word."""
    return name if _IS_BARE(name) else json.dumps(name)


def reference(value: Value) -> str:
    """`%name`, or `@name` for a state."""
    return f"{'@' if value.is_state else '%'}{name_text(value.name)}"


def attr_text(value: AttrValue) -> str:
    """An attribute value. Tuples are written `[…]`, dims and dtypes as bare words, statics as `$name`."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, DType):
        return value.text
    if isinstance(value, Static):
        return f"${name_text(value.name)}"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(attr_text, value)) + "]"
    assert isinstance(value, sympy.Expr), f"{value!r} is not an attribute value"
    return dim_text(value)


def fold_names(names: Iterable[str]) -> list[str]:
    """`@` references to states, with names that count up folded."""
    listed = list(names)

    def form(index: int, ordinal: int, number: int) -> str | None:
        return _template(listed[index], ordinal, number)

    texts: list[str] = []
    for item in fold(listed, form):
        texts += item.lines() if isinstance(item, Run) else [name_text(listed[item])]
    return [f"@{text}" for text in texts]


def _template(name: str, ordinal: int, number: int) -> str | None:
    folded = template(name, ordinal, number)
    return folded if folded != name and _IS_BARE(name) else None


def _typed(value: Value) -> str:
    return f"{reference(value)}: {value.type}"


@lru_cache(maxsize=4096)
def _origin_text(origin: Origin) -> str:
    if origin.file or origin.line:
        return f" at {json.dumps(origin.path)} {json.dumps(origin.file)}:{origin.line}"
    return f" at {json.dumps(origin.path)}" if origin.path else ""


def _dim_line(dim: NamedDim) -> str:
    line = f"dim {dim.name} {dim.minimum}..{'' if dim.maximum is None else dim.maximum}"
    if dim.bound is None:
        return line
    return f"{line} ragged <= {dim_text(dim.bound)}" + (f" by {dim.extent}" if dim.extent is not None else "")


def _axis_line(axis: Axis) -> str:
    size = "*".join(axis.of) if axis.of else "*" if axis.size is None else str(axis.size)
    return f"axis {axis.name} = {size}"


def _entry_line(entry: Entry) -> str:
    outputs = ", ".join(map(name_text, entry.outputs))
    updates = f" updates ({', '.join(fold_names(entry.updates))})" if entry.updates else ""
    captured = " captured" * entry.captured
    captured += f" pieces ({', '.join(f'@{name_text(name)}' for name in entry.pieces)})" if entry.pieces else ""
    return f"entry {name_text(entry.name)} = @{name_text(entry.function)} -> ({outputs}){updates}{captured}"


def _state_lines(states: Mapping[str, State]) -> list[str]:
    listed = list(states.values())
    texts: dict[int, str] = {}  # most states share the object that says how they begin
    inits = [texts.get(id(s.init)) or texts.setdefault(id(s.init), _init_text(s.init)) for s in listed]
    naming = {id(s.init) for s in listed if _names_states(s.init)}

    def form(index: int, ordinal: int, number: int) -> str | None:
        state = listed[index]
        name = _template(state.name, ordinal, number)
        if name is None:
            return None
        seed, init = name, inits[index]
        if state.seed_name != state.name:
            if not _IS_BARE(state.seed_name):
                return None
            seed = template(state.seed_name, ordinal, number)
        if id(state.init) in naming:
            if "{" in init:
                return None  # braces mark the range
            init = _init_text(_template_all(state.init, ordinal, number))
        return _state_line(state, name, seed, init)

    lines: list[str] = []
    for item in fold(list(states), form):
        if isinstance(item, Run):
            lines += item.lines()
        else:
            state = listed[item]
            lines.append(_state_line(state, name_text(state.name), name_text(state.seed_name), inits[item]))
    return lines


def _state_line(state: State, name: str, seed: str, init: str) -> str:
    marks = f"{' trainable' if state.trainable else ''}{'' if state.persist else ' transient'}"
    marks += " host" if state.host else ""
    if seed != name:
        marks += f" seed {seed}"
    return f"state @{name}: {state.value.type} = {state.kind.value}{marks}{init}"


def _init_text(init: Any) -> str:
    return f" init {attr_text(init)}" if init else ""


def _names_states(init: Any) -> bool:
    """Whether a call of an initialiser has a text besides its own name."""
    return any(isinstance(argument, str) for call in init for argument in call[1:])


def _template_all(value: Any, ordinal: int, number: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_template_all(v, ordinal, number) for v in value)
    return template(value, ordinal, number) if isinstance(value, str) else value
