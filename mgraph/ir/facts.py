"""Dim facts: relations between dim expressions, such as `S % tp == 0`; a mesh axis stands for its size."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy

from mgraph.ir.dims import Dim, NamedDim, as_dim, dim_text, divide, names_in, parse_dim, substitute, symbol

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


def multiples(facts: Iterable[str], sizes: Mapping[str, int | None]) -> dict[str, int]:
    """Named dims that facts `S % n == 0` say are multiples of n, a number or an axis of `sizes`; of several, of all."""
    found: dict[str, int] = {}
    for text in facts:
        fact = parse_fact(text)
        if fact.relation == "==" and fact.right == 0 and isinstance(fact.left, sympy.Mod):
            dim, by = fact.left.args
            number = int(by) if by.is_Integer else sizes.get(str(by))
            if dim.is_Symbol and number is not None:
                found[str(dim)] = math.lcm(number, found.get(str(dim), 1))
    return found


def dependent(dims: Mapping[str, NamedDim], name: str) -> frozenset[str]:
    """A named dim, and the ragged dims whose bounds depend on it."""
    return frozenset([name, *(d.name for d in dims.values() if d.bound is not None and name in names_in(d.bound))])


def share(extent: Dim, by: int, known: Mapping[str, int]) -> Dim | None:
    """`extent / by` where it is exact for all values of the named dims, of which those in `known` are multiples of a
    number; else `None`. With S a multiple of 4, a quarter of `B*S` is `B*S/4`."""
    if isinstance(extent, int) or not known:
        return divide(extent, by)
    # What is a multiple of n is n times something, and that may take the divisor.
    divided = divide(substitute(extent, {name: n * symbol(name) for name, n in known.items()}), by)
    if divided is None or isinstance(divided, int):
        return divided
    return as_dim(divided.xreplace({symbol(name): symbol(name) / n for name, n in known.items()}))
