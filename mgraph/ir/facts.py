"""Dim facts: relations between dim expressions, such as `S % tp == 0`; a mesh axis stands for its size."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mgraph.ir.dims import Dim, dim_text, names_in, parse_dim, substitute

RELATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
_RELATION = re.compile("|".join(map(re.escape, RELATIONS)))


@dataclass(frozen=True, slots=True)
class Relation:
    """A parsed fact: `left relation right`."""

    left: Dim
    relation: str
    right: Dim

    def names(self) -> frozenset[str]:
        """The dims and mesh axes that the fact speaks of."""
        return names_in(self.left) | names_in(self.right)

    def holds(self, values: Mapping[str, int]) -> bool:
        """Whether it is true for an extent per name; all names must be given."""
        left, right = (substitute(side, values) for side in (self.left, self.right))
        assert isinstance(left, int) and isinstance(right, int), f"no value for {dim_text(left)} {dim_text(right)}"
        return bool(RELATIONS[self.relation](left, right))


def parse_fact(text: str) -> Relation:
    """Read a fact: two dim expressions around one of `== != <= >= < >`. Raises ValueError."""
    found = list(_RELATION.finditer(text))
    if len(found) != 1:
        raise ValueError(f"a fact is one relation between two dim expressions, such as S % 4 == 0, not {text!r}")
    return Relation(parse_dim(text[: found[0].start()]), found[0].group(), parse_dim(text[found[0].end() :]))
