"""Parameter groups by rule: which parameters the optimizer treats otherwise, or not at all.

A rule is one line of text, or a mapping in a recipe file:

    *.norm*|*.bias: weight_decay=0, lr=0.1
    embed.*: frozen

Patterns are file-name patterns over parameter names. For each parameter the first rule with a pattern that fits is
taken. `lr` multiplies the learning rate, `weight_decay` the recipe's weight decay; a parameter without a rule, or whose
rule says nothing of decay, decays where it has two dims or more. A frozen parameter gets no gradient and no state.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mgraph.errors import OptionError, did_you_mean

FIELDS = ("match", "weight_decay", "lr", "frozen")
"""What a rule may say; `match` is required."""
_EXAMPLE = 'write "PATTERN|PATTERN: weight_decay=0, lr=0.1, frozen"'
_FEW = 5


@dataclass(frozen=True, slots=True)
class Group:
    """One rule: patterns, the multipliers of the learning rate and of the weight decay (`None`: by the number of dims),
    and whether the parameters stay as they are."""

    patterns: tuple[str, ...] = ("*",)
    lr: float = 1.0
    weight_decay: float | None = None
    frozen: bool = False

    @property
    def text(self) -> str:
        """The rule as `parse_group` reads it."""
        parts = [] if self.weight_decay is None else [f"weight_decay={self.weight_decay:g}"]
        parts += [] if self.lr == 1.0 else [f"lr={self.lr:g}"]
        parts += ["frozen"] if self.frozen else []
        return f"{'|'.join(self.patterns)}: {', '.join(parts)}"

    def decay(self, base: float, dims: int) -> float:
        """The weight decay of a parameter with so many dims."""
        return base * (float(dims > 1) if self.weight_decay is None else self.weight_decay)

    def fits(self, name: str) -> bool:
        """Whether the rule is about a parameter of this name."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.patterns)


def parse_group(rule: str | Mapping[str, Any]) -> Group:
    """Read a rule, as text or as a mapping with the keys of `FIELDS`. Raises OptionError."""
    values = dict(rule) if isinstance(rule, Mapping) else _fields(rule)
    shown = rule if isinstance(rule, str) else ", ".join(f"{k}: {v}" for k, v in rule.items())
    for name in values:
        if name not in FIELDS:
            raise OptionError(f"unknown field {name!r} in the group '{shown}'", hint=did_you_mean(str(name), FIELDS))
    patterns = tuple(p.strip() for p in str(values.get("match", "")).split("|") if p.strip())
    if not patterns or len(values) == 1:
        raise OptionError(f"the group '{shown}' names no {'effect' if patterns else 'parameters'}", hint=_EXAMPLE)
    frozen = values.get("frozen", False)
    if not isinstance(frozen, bool):
        raise OptionError(f"frozen is {frozen!r} in the group '{shown}'", hint="true or false")
    decay = _multiplier(values, "weight_decay", shown) if "weight_decay" in values else None
    return Group(patterns, _multiplier(values, "lr", shown) if "lr" in values else 1.0, decay, frozen)


def _fields(text: str) -> dict[str, Any]:
    """The fields of a rule written as text. A pattern holds no colon."""
    match, _, rest = text.partition(":")
    values: dict[str, Any] = {"match": match}
    for part in filter(None, (p.strip() for p in rest.split(","))):
        name, equals, value = (p.strip() for p in part.partition("="))
        values[name.replace("-", "_")] = value if equals else True
    return values


def _multiplier(values: Mapping[str, Any], name: str, shown: str) -> float:
    try:
        number = float(values[name])
    except (TypeError, ValueError):
        number = -1.0
    if isinstance(values[name], bool) or not 0 <= number < float("inf"):
        raise OptionError(f"{name} is {values[name]!r} in the group '{shown}'", hint="a multiplier of at least 0")
    return number


def assign(rules: Sequence[str], names: Iterable[str]) -> dict[str, Group]:
    """The group of each parameter; one without a rule has the default `Group()`.

    Raises OptionError for a rule that no parameter takes.
    """
    names = list(names)
    groups = [parse_group(rule) for rule in rules]
    taken = {name: next((group for group in groups if group.fits(name)), None) for name in names}
    for group in groups:
        if group in taken.values():
            continue
        fitting = [name for name in names if group.fits(name)]
        if fitting:
            hint = "put it before the rules that take its parameters, or leave it out"
            raise OptionError(f"the group '{group.text}' has no parameters left, {fitting[0]} among them", None, hint)
        raise OptionError(f"the group '{group.text}' matches no parameter", "--groups", _nearest(group, names))
    return {name: group or Group() for name, group in taken.items()}


def _nearest(group: Group, names: Sequence[str]) -> str:
    near = [n for p in group.patterns for n in difflib.get_close_matches(p, names, n=1, cutoff=0.4)]
    if near:
        return f"did you mean '{near[0]}'?"
    return f"a pattern over names such as {', '.join(names[:_FEW])}"
