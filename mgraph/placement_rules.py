"""Rules that say where parameters lie over a mesh axis, instead of where a pass would put them.

A rule is one line of text, or a mapping in a recipe file:

    layers.*.ffn.down.weight: S(1)@tp
    {match: "embed.weight|head.weight", place: R@tp}

`S(dim)@axis` splits a dim over the axis, `R@axis` keeps the tensor whole on each of its ranks. `mgraph.name_rules` has
what patterns mean; rules of different axes do not compete.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mgraph import name_rules
from mgraph.errors import OptionError

KIND, FLAG = "placement", "--place"
PLACE = "place"
"""The key of a rule's placement where it is written as a mapping."""
_EXAMPLE = 'write "PATTERN|PATTERN: S(0)@tp" or "PATTERN|PATTERN: R@tp"'
_PLACE = re.compile(r"(?:R|S\(\s*(\d+)\s*\))\s*@\s*(\w+)")


@dataclass(frozen=True, slots=True)
class PlacementRule:
    """One rule: patterns, the mesh axis, and the dim that is split over it (`None`: none is)."""

    patterns: tuple[str, ...]
    axis: str
    dim: int | None = None

    @property
    def text(self) -> str:
        """The rule as `parse_placement` reads it."""
        place = "R" if self.dim is None else f"S({self.dim})"
        return f"{'|'.join(self.patterns)}: {place}@{self.axis}"

    def fits(self, name: str) -> bool:
        """Whether the rule is about a parameter of this name."""
        return name_rules.fits(self.patterns, name)


def parse_placement(rule: str | Mapping[str, Any]) -> PlacementRule:
    """Read a rule, as text or as a mapping with the keys `match` and `place`. Raises OptionError."""
    given: str | Mapping[str, Any] = rule
    if isinstance(rule, str) and ":" in rule:
        match, _, place = rule.partition(":")
        given = {name_rules.MATCH: match, PLACE: place.strip()}
    patterns, values, shown = name_rules.read_rule(given, (PLACE,), KIND, _EXAMPLE)
    found = _PLACE.fullmatch(str(values[PLACE]).strip())
    if found is None:
        shown = rule if isinstance(rule, str) else shown
        raise OptionError(f"the {KIND} '{shown}' says {values[PLACE]!r}", FLAG, _EXAMPLE)
    return PlacementRule(patterns, found[2], None if found[1] is None else int(found[1]))


def chosen(rules: Sequence[str], axis: str, names: Iterable[str]) -> dict[str, PlacementRule]:
    """The rule of each parameter that has one for an axis. Raises OptionError for a rule that no parameter takes."""
    own = [rule for rule in map(parse_placement, rules) if rule.axis == axis]
    taken = name_rules.first_rules(own, names, KIND, FLAG)
    return {name: rule for name, rule in taken.items() if rule is not None}
