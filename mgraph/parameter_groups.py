"""Parameter groups by rule: which parameters the optimizer treats otherwise, or not at all.

A rule is one line of text, or a mapping in a recipe file:

    *.norm*|*.bias: weight_decay=0, lr=0.1
    embed.*: frozen

`mgraph.name_rules` has what patterns mean. `lr` multiplies the learning rate, `weight_decay` the recipe's weight decay;
a parameter without a rule, or whose rule says nothing of decay, decays where it has two dims or more. A frozen
parameter gets no gradient and no state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mgraph import name_rules
from mgraph.errors import OptionError

FIELDS = ("weight_decay", "lr", "frozen")
"""What a rule may say of its parameters."""
_EXAMPLE = 'write "PATTERN|PATTERN: weight_decay=0, lr=0.1, frozen"'


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
        return name_rules.fits(self.patterns, name)


def parse_group(rule: str | Mapping[str, Any]) -> Group:
    """Read a rule, as text or as a mapping with the keys of `FIELDS` and `match`. Raises OptionError."""
    patterns, values, shown = name_rules.read_rule(rule, FIELDS, "group", _EXAMPLE)
    frozen = values.get("frozen", False)
    if not isinstance(frozen, bool):
        raise OptionError(f"frozen is {frozen!r} in the group '{shown}'", hint="true or false")
    decay = _multiplier(values, "weight_decay", shown) if "weight_decay" in values else None
    return Group(patterns, _multiplier(values, "lr", shown) if "lr" in values else 1.0, decay, frozen)


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
    taken = name_rules.first_rules([parse_group(rule) for rule in rules], names, "group", "--groups")
    return {name: group or Group() for name, group in taken.items()}
