"""Verifier rules on what a module declares: names, dims, mesh, facts, state, entry points."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from mgraph.ir.cursor import RESERVED, suggestion
from mgraph.ir.dims import Dim, Extent, NamedDim, dim_text, names_in
from mgraph.ir.facts import parse_fact
from mgraph.ir.graph import Entry, Function, InitCall, Module, State, StateKind
from mgraph.ir.problem import Problem, Rule, Scope

Named: TypeAlias = NamedDim | State | Function | Entry


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbers(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(v, int | float) for v in value)


def _text(value: Any) -> bool:
    return isinstance(value, str)


INIT_CALLS: dict[str, tuple[Callable[[Any], bool], ...]] = {
    "zeros_": (),
    "fill_": (_number,),
    "seed_": (),
    "fill_range_": (_number, _number, _number),
    "normal_": (_number, _number),
    "uniform_": (_number, _number),
    "mul_": (_number,),
    "add_": (_number,),
    "clamp_": (_number, _number),
    "erfinv_": (),
    "copy_": (_numbers,),
    "copy_from": (_text,),
}
"""The calls an initialiser may be made of, with a check per argument."""


def _names(scope: Scope) -> Iterator[Problem]:
    listed: list[tuple[str, Mapping[str, Named]]] = [
        ("dim", scope.module.dims),
        ("state", scope.states),
        ("function", scope.functions),
        ("entry", scope.entries),
    ]
    for what, named in listed:
        for key, thing in named.items():
            if key != thing.name:
                yield Problem(f"{what} {thing.name!r} is listed under the name {key!r}")
    for state in scope.states.values():
        if state.value.name != state.name or not state.value.is_state:
            yield Problem(f"state @{state.name} has the value {state.value!r}")


def _dims(scope: Scope) -> Iterator[Problem]:
    for dim in scope.module.dims.values():
        if not dim.name.isidentifier() or dim.name in RESERVED:
            yield Problem(f"{dim.name!r} cannot be the name of a dim")
        if dim.minimum < 0 or (dim.maximum is not None and dim.maximum < dim.minimum):
            yield Problem(f"dim {dim.name} ranges over {dim.minimum}..{dim.maximum}")


def _ragged(scope: Scope) -> Iterator[Problem]:
    for dim in scope.module.dims.values():
        if dim.bound is None:
            if dim.extent is not None:
                yield Problem(f"dim {dim.name} has an extent ({dim.extent}) but no bound")
            continue
        if not isinstance(dim.extent, Extent):
            yield Problem(f"ragged dim {dim.name} does not say how its extent is known", hint="bound, budget or host")
        for name in sorted(_not_plain(dim.bound, scope.module.dims)):
            yield Problem(f"ragged dim {dim.name} is bounded by {dim_text(dim.bound)}, and {name} is no plain dim")


def _not_plain(bound: Dim, dims: Any) -> set[str]:
    return {name for name in names_in(bound) if name not in dims or dims[name].ragged}


def _mesh(scope: Scope) -> Iterator[Problem]:
    seen: set[str] = set()
    for axis in scope.module.mesh:
        if not axis.name.isidentifier() or axis.name in seen:
            yield Problem(f"mesh axis {axis.name!r} is declared twice or is no name")
        if axis.of and axis.size is not None:
            yield Problem(f"mesh axis {axis.name} has a size and is a product of axes")
        if axis.size is not None and axis.size < 1:
            yield Problem(f"mesh axis {axis.name} has size {axis.size}")
        for part in axis.of:
            if part not in seen:
                yield Problem(f"mesh axis {axis.name} is made of {part!r}, which is not declared before it")
        seen.add(axis.name)


def _facts(scope: Scope) -> Iterator[Problem]:
    known = {*scope.module.dims, *(axis.name for axis in scope.module.mesh)}
    for fact in scope.module.facts:
        try:
            unknown = sorted(parse_fact(fact.text).names() - known)
        except ValueError as error:
            yield Problem(str(error))
            continue
        for name in unknown:
            yield Problem(f"fact {fact.text!r} speaks of {name!r}", hint=suggestion(name, known))


def _state(scope: Scope) -> Iterator[Problem]:
    for state in scope.states.values():
        if not isinstance(state.kind, StateKind):
            yield Problem(f"state @{state.name} is of kind {state.kind!r}")
        if state.trainable and state.kind is not StateKind.PARAM:
            yield Problem(f"state @{state.name} is trainable, but it is a {state.kind}, not a param")
        if not state.seed_name:
            yield Problem(f"state @{state.name} has no seed name")


def _init(scope: Scope) -> Iterator[Problem]:
    fitting: set[int] = set()  # most states share the object that says how they begin
    for state in scope.states.values():
        for call in state.init:
            if id(call) in fitting and call[0] != "copy_from":
                continue
            fitting.add(id(call))
            if not _fits(call):
                yield Problem(f"state @{state.name} cannot be initialised by {call!r}", hint=_init_hint(call))
            elif call[0] == "copy_from":
                yield from _copied(scope.module, state, str(call[1]))


def _fits(call: InitCall) -> bool:
    checks = INIT_CALLS.get(call[0]) if call and isinstance(call[0], str) else None
    return (
        checks is not None and len(call) == 1 + len(checks) and all(c(a) for c, a in zip(checks, call[1:], strict=True))
    )


def _init_hint(call: InitCall) -> str | None:
    if call and isinstance(call[0], str) and call[0] in INIT_CALLS:
        return f"{call[0]} takes {len(INIT_CALLS[call[0]])} argument(s), numbers unless it copies"
    return suggestion(str(call[0]) if call else "", INIT_CALLS)


def _copied(module: Module, state: State, name: str) -> Iterator[Problem]:
    source = module.state.get(name)
    if source is None:
        hint = suggestion(name, module.state)
        yield Problem(f"state @{state.name} is a copy of @{name}, which is not declared", hint=hint)
    elif source is state or source.type.shape != state.type.shape:
        yield Problem(f"state @{state.name}, {state.type}, cannot be a copy of @{name}, {source.type}")


def _entries(scope: Scope) -> Iterator[Problem]:
    for entry in scope.entries.values():
        function = scope.module.functions.get(entry.function)
        if function is None:
            hint = suggestion(entry.function, scope.module.functions)
            yield Problem(f"entry {entry.name} has no function {entry.function!r}", hint=hint)
        elif function.slots or function.statics:
            yield Problem(f"entry {entry.name}: an entry function has no slots and no statics", function)
        for name in entry.pieces:
            if name not in scope.module.functions or name == entry.function or entry.captured:
                yield Problem(f"entry {entry.name}: {name!r} cannot be a piece of it", function)
        for names in (entry.outputs, entry.updates, entry.pieces):
            for name in sorted(n for n, count in Counter(names).items() if count > 1):
                yield Problem(f"entry {entry.name} names {name!r} twice", function)


def _entry_results(scope: Scope) -> Iterator[Problem]:
    for entry in scope.entries.values():
        function = scope.module.functions[entry.function]
        expected = len(entry.outputs) + len(entry.updates)
        if len(function.results) != expected:
            message = f"entry {entry.name} has {expected} outputs and updates, but {len(function.results)} results"
            yield Problem(message, function)
        else:
            yield from _updates(scope.module, entry)


def _updates(module: Module, entry: Entry) -> Iterator[Problem]:
    function = module.functions[entry.function]
    for name, value in zip(entry.updates, function.results[len(entry.outputs) :], strict=True):
        state = module.state.get(name)
        if state is None:
            hint = suggestion(name, module.state)
            message = f"entry {entry.name} updates @{name}, which is not declared"
            yield Problem(message, function, function.producers().get(value), hint)
        elif value.type is not state.type and value.type != state.type:
            message = f"entry {entry.name} updates @{name}, {state.type}, with {value!r}, {value.type}"
            yield Problem(message, function, function.producers().get(value))


MODULE_RULES: tuple[Rule, ...] = (
    Rule("names", "everything is listed under its own name", _names),
    Rule("dims", "a dim has an identifier as its name, and a range that is not empty", _dims),
    Rule("ragged", "a ragged dim has a bound over plain dims and says how its extent is known", _ragged),
    Rule("mesh", "a mesh axis is declared once, with a size, or as `*`, or as a product of axes before it", _mesh),
    Rule("facts", "a fact is a relation between declared dims and mesh axes", _facts),
    Rule("state", "a state has a kind and a seed name, and only a param is trainable", _state),
    Rule("init", "an initialiser is a list of known calls with fitting arguments", _init),
    Rule("entries", "an entry has a function without slots and statics, and names nothing twice", _entries),
)
ENTRY_RULES: tuple[Rule, ...] = (
    Rule(
        "entry-results", "an entry's function returns its outputs, then the new values of its updates", _entry_results
    ),
)
