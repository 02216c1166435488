"""Rules about parameters by name: what the rules for groups and for adapters have in common.

A rule is one line of text, or a mapping in a recipe file:

    *.norm*|*.bias: weight_decay=0, lr=0.1
    match=*.norm*|*.bias, weight_decay=0, lr=0.1
    {match: "*.norm*|*.bias", weight_decay: 0, lr: 0.1}

Patterns are file-name patterns over parameter names. For each parameter the first rule with a pattern that fits is
taken; a rule that no parameter takes is an error.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from mgraph.errors import OptionError, did_you_mean

MATCH = "match"
"""The key of a rule's patterns."""
_FEW = 5


class NameRule(Protocol):
    """What a rule must be to be assigned: its patterns, its text, and whether it is about a name."""

    @property
    def patterns(self) -> tuple[str, ...]:
        """File-name patterns."""

    @property
    def text(self) -> str:
        """The rule as a person may write it."""

    def fits(self, name: str) -> bool:
        """Whether the rule is about a parameter of this name."""


R = TypeVar("R", bound=NameRule)


def fits(patterns: Iterable[str], name: str) -> bool:
    """Whether one of the patterns is about a name."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def split_patterns(text: str) -> tuple[str, ...]:
    """The patterns of `PATTERN|PATTERN`."""
    return tuple(p.strip() for p in text.split("|") if p.strip())


def read_rule(
    rule: str | Mapping[str, Any], fields: Sequence[str], kind: str, example: str
) -> tuple[tuple[str, ...], dict[str, Any], str]:
    """The patterns of a rule, its other fields, and the rule as errors show it; a field without a value is True.

    Raises OptionError for a field that is not among `fields`, and where there are no patterns or nothing else.
    """
    if not isinstance(rule, str | Mapping):
        raise OptionError(f"{kind}: expected text or a mapping, not {rule!r}", hint=example)
    values = dict(rule) if isinstance(rule, Mapping) else _fields(rule)
    shown = rule if isinstance(rule, str) else ", ".join(f"{k}: {v}" for k, v in rule.items())
    for name in values:
        if name not in (MATCH, *fields):
            hint = did_you_mean(str(name), (MATCH, *fields)) if MATCH in values else example
            raise OptionError(f"unknown field {name!r} in the {kind} '{shown}'", hint=hint)
    patterns = split_patterns(str(values.pop(MATCH, "")))
    if not patterns or not values:
        raise OptionError(f"the {kind} '{shown}' names no {'effect' if patterns else 'parameters'}", hint=example)
    return patterns, values, shown


def _fields(text: str) -> dict[str, Any]:
    """The fields of a rule written as text. A pattern holds neither a colon nor a comma."""
    match, colon, rest = text.partition(":")
    values: dict[str, Any] = {MATCH: match}
    if not colon and "=" in text:
        values, rest = {}, text
    for part in filter(None, (p.strip() for p in rest.split(","))):
        name, equals, value = (p.strip() for p in part.partition("="))
        values[name.replace("-", "_")] = value if equals else True
    return values


def first_rules(rules: Sequence[R], names: Iterable[str], kind: str, flag: str) -> dict[str, R | None]:
    """The rule of each name, `None` where no rule is about it. Raises OptionError for a rule that no name takes."""
    names = list(names)
    taken = {name: next((rule for rule in rules if rule.fits(name)), None) for name in names}
    for rule in rules:
        if rule in taken.values():
            continue
        fitting = [name for name in names if rule.fits(name)]
        if fitting:
            hint = "put it before the rules that take its parameters, or leave it out"
            raise OptionError(f"the {kind} '{rule.text}' has no parameters left, {fitting[0]} among them", None, hint)
        raise OptionError(f"the {kind} '{rule.text}' matches no parameter", flag, nearest(rule.patterns, names))
    return taken


def nearest(patterns: Iterable[str], names: Sequence[str]) -> str:
    """A hint for patterns that fit no name."""
    for pattern in patterns:
        inner = f"*{pattern.removesuffix('.weight').strip('*')}*"
        if any(fnmatch.fnmatchcase(name, inner) for name in names):
            return f"did you mean '{inner}'? A pattern is about the whole name"
    near = [n for p in patterns for n in difflib.get_close_matches(p, names, n=1, cutoff=0.4)]
    return f"did you mean '{near[0]}'?" if near else f"a pattern over names such as {', '.join(names[:_FEW])}"
