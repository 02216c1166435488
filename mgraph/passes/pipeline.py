"""Pipelines: lists of passes as data, their text, their order checks, and the one runner.

The runner knows no pass: verifying, timing, snapshots and op counts are instruments (`mgraph.passes.instrument`).
"""

from __future__ import annotations

import dataclasses
import fnmatch
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mgraph.errors import PassError, did_you_mean
from mgraph.ir.graph import Module
from mgraph.passes import PASSES, pass_class
from mgraph.passes.base import Pass, Report
from mgraph.passes.instrument import Instrument
from mgraph.passes.spec import OptionValue, parse_specs, print_value

Pipeline = tuple[Pass, ...]

NORMALIZE = "outline,canonicalize,constant-fold,cse,dce"
"""The normalize stage: outline first, so that everything after it works once per unique layer."""


@dataclass(slots=True)
class PassResult:
    """What one pass did: its place in the pipeline, spec, report, and what the instruments measured (JSON data)."""

    index: int
    name: str
    spec: str
    report: Report
    changed: bool = False
    measured: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain data: what a package keeps beside the snapshot of the pass."""
        return dataclasses.asdict(self)


def make_pass(name: str, options: Mapping[str, OptionValue] | None = None) -> Pass:
    """A pass from its name and options. Raises PassError for an unknown name, option, or a value of a wrong type."""
    cls = pass_class(name)
    hints = typing.get_type_hints(cls)
    known = {f.name: hints[f.name] for f in dataclasses.fields(cls)}
    given: dict[str, Any] = {}
    for option, value in (options or {}).items():
        if option not in known:
            hint = did_you_mean(option, known) if known else "it takes no options"
            raise PassError(f"pass '{name}' has no option '{option}'", hint=hint)
        given[option] = _fit(name, option, value, known[option])
    return cls(**given)


def _fit(name: str, option: str, value: OptionValue, hint: Any) -> Any:
    if hint is float and type(value) is int:
        return float(value)
    if not _is_a(value, hint):
        wanted = getattr(hint, "__name__", str(hint)) if not typing.get_args(hint) else str(hint)
        raise PassError(
            f"option '{option}' of pass '{name}' is {print_value(value)}", hint=f"give a value of type {wanted}"
        )
    return value


def _is_a(value: Any, hint: Any) -> bool:
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_is_a(item, arguments[0]) for item in value)
    if arguments:  # a union such as `int | None`
        return any(_is_a(value, option) for option in arguments)
    return value is None if hint is type(None) else type(value) is hint


def parse_pipeline(text: str) -> Pipeline:
    """Read a pipeline. Raises PassError where the text, a name or an option is wrong."""
    return tuple(make_pass(name, options) for name, options in parse_specs(text))


def print_pipeline(pipeline: Iterable[Pass]) -> str:
    """The text that `parse_pipeline` reads back to equal passes."""
    return ",".join(p.spec for p in pipeline)


def check_order(pipeline: Sequence[Pass], have: frozenset[str] = frozenset()) -> frozenset[str]:
    """The properties that hold after the pipeline, from those that hold before it.

    Raises PassError where a pass requires what does not hold there, or conflicts with what does.
    """
    for index, pass_ in enumerate(pipeline):
        where = f"pass {index + 1} of '{print_pipeline(pipeline)}'"
        for missing in sorted(pass_.requires - have):
            raise PassError(f"pass '{pass_.name}' requires the property '{missing}'", where, _how_to_get(missing))
        for clash in sorted(pass_.conflicts & have):
            raise PassError(
                f"pass '{pass_.name}' cannot run where the property '{clash}' holds",
                where,
                f"put it before the pass that provides '{clash}'",
            )
        have = (have - pass_.invalidates) | pass_.provides
    return have


def _how_to_get(property_: str) -> str:
    providers = [name for name in PASSES if property_ in pass_class(name).provides]
    return (
        f"put {' or '.join(repr(p) for p in providers)} before it, or do not disable it"
        if providers
        else "no pass provides it"
    )


def select(
    pipeline: Sequence[Pass],
    *,
    disable: Sequence[str] = (),
    only: Sequence[str] = (),
    stop_after: str | None = None,
) -> Pipeline:
    """The passes to run: those up to `stop_after` that match `only` (if given) and no pattern of `disable`.

    Patterns are file-name patterns over pass names (`raise-*`). One that matches no pass of the pipeline is an error.
    """
    names = [p.name for p in pipeline]
    for pattern in (*disable, *only, *([stop_after] if stop_after else [])):
        if not fnmatch.filter(names, pattern):
            raise PassError(
                f"no pass of the pipeline is named '{pattern}'", hint=did_you_mean(pattern, dict.fromkeys(names))
            )
    if stop_after:
        last = max(i for i, name in enumerate(names) if fnmatch.fnmatchcase(name, stop_after))
        pipeline = pipeline[: last + 1]
    return tuple(p for p in pipeline if (not only or _any(p.name, only)) and not _any(p.name, disable))


def _any(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def run_pipeline(
    module: Module,
    pipeline: Sequence[Pass] | str,
    instruments: Sequence[Instrument] = (),
    *,
    have: frozenset[str] = frozenset(),
    disable: Sequence[str] = (),
    only: Sequence[str] = (),
    stop_after: str | None = None,
) -> tuple[Module, tuple[PassResult, ...]]:
    """Run the selected passes in order and give the last module with one result per pass.

    The module has a property per entry point, named as it (`forward`), and those in `have`. Raises PassError for a
    wrong pipeline before any pass runs.
    """
    passes = parse_pipeline(pipeline) if isinstance(pipeline, str) else tuple(pipeline)
    passes = select(passes, disable=disable, only=only, stop_after=stop_after)
    check_order(passes, have | frozenset(module.entries))
    for instrument in instruments:
        instrument.start(module)
    results = []
    for index, pass_ in enumerate(passes, start=1):
        result = PassResult(index, pass_.name, pass_.spec, Report())
        for instrument in instruments:
            instrument.passing(pass_)
            instrument.before(result, module)
        try:
            after = pass_.run(module, result.report)
        except Exception:
            for instrument in instruments:
                instrument.failed()
            raise
        result.changed = after is not module
        # The last to begin is the first to end, so that a timer listed last measures the pass alone.
        for instrument in reversed(instruments):
            instrument.after(result, module, after)
        module = after
        results.append(result)
    return module, tuple(results)
