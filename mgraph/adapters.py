"""Adapters by rule: which linear weights get a trained update of low rank (LoRA, Hu et al. 2021), and which.

    *.q_proj|*.v_proj: rank=8, alpha=16, dropout=0.05, rslora

A matched linear gives `y = x Wᵀ + scale (dropout(x) Aᵀ) Bᵀ` with A [rank, in] and B [out, rank], where scale is
`alpha / rank`, or with `rslora` `alpha / sqrt(rank)` (Kalajdzievski 2023). Patterns are about the name of the weight,
with or without the `.weight` at its end. `alpha` is `rank` where it is not given.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mgraph import name_rules
from mgraph.errors import OptionError

FIELDS = ("rank", "alpha", "dropout", "rslora")
"""What a rule may say of its adapters; `rank` is required."""
_EXAMPLE = 'write "PATTERN|PATTERN: rank=8, alpha=16, dropout=0.05, rslora"'
_WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class AdapterRule:
    """One rule: patterns, the rank, alpha, the probability of dropout on the input, and how alpha scales."""

    patterns: tuple[str, ...]
    rank: int
    alpha: float
    dropout: float = 0.0
    rslora: bool = False

    @property
    def text(self) -> str:
        """The rule as `parse_adapter` reads it."""
        parts = [f"rank={self.rank}", f"alpha={self.alpha:.15g}"]
        parts += [f"dropout={self.dropout:.15g}"] if self.dropout else []
        parts += ["rslora"] if self.rslora else []
        return f"{'|'.join(self.patterns)}: {', '.join(parts)}"

    @property
    def scale(self) -> float:
        """The factor on the update."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def fits(self, name: str) -> bool:
        """Whether the rule is about a weight of this name."""
        return any(name_rules.fits(self.patterns, n) for n in (name, name.removesuffix(_WEIGHT)))


def parse_adapter(rule: str | Mapping[str, Any]) -> AdapterRule:
    """Read a rule, as text or as a mapping with the keys of `FIELDS` and `match`. Raises OptionError."""
    patterns, values, shown = name_rules.read_rule(rule, FIELDS, "adapter", _EXAMPLE)

    def wrong(name: str, hint: str) -> OptionError:
        given = f"is {values[name]!r}" if name in values else "is not given"
        return OptionError(f"{name} {given} in the adapter '{shown}'", hint=hint)

    rank = _number(values.get("rank"))
    if not (rank >= 1 and rank.is_integer()):
        raise wrong("rank", "a whole number of at least 1")
    alpha = _number(values.get("alpha", rank))
    if not 0 < alpha < math.inf:
        raise wrong("alpha", "a number above 0; the update is scaled by alpha / rank")
    dropout = _number(values.get("dropout", 0.0))
    if not 0 <= dropout < 1:
        raise wrong("dropout", "a probability from 0 to below 1")
    rslora = {"true": True, "false": False}.get(str(values.get("rslora", False)).lower())
    if rslora is None:
        raise wrong("rslora", "true or false")
    return AdapterRule(patterns, int(rank), alpha, dropout, rslora)


def adapter_names(weight: str) -> tuple[str, str]:
    """The names of A and B of a weight's adapter."""
    stem = weight.removesuffix(_WEIGHT)
    return f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"


def _number(value: Any) -> float:
    """A number as it is, or written as text; nan for anything else."""
    try:
        return math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return math.nan
