"""The dim-signature language: `... k+, n k+ -> ... n` says shapes and, from them, sharding rules.

Grammar: operands, comma-separated, `->`, results, comma-separated. Each is a list of dims separated by blanks:

* a name (`m`): equal names are equal extents;
* `...`: any leading dims, the same everywhere (only at the front); results that lack them sum over them;
* an integer; `$attr`: the integer attribute `attr`; `(t k)`: a product of dims;
* marks on a name: `k+` is summed over (operands only; a shard of it makes the result `P(sum)`), `k^` must not be split.

A result may end in `:dtype` (default: the first operand's dtype). A name that only results use without a way to bind
it is an error at declaration. Names with no mark that are in every result and every operand that has them may be split.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mgraph.ir.dims import Dim, as_dim, divide, product
from mgraph.ir.types import DType, Partial, Placement, Shard, TensorType

_TOKEN = re.compile(r"\.\.\.|\([^)]*\)|\$\w+|\w+[+^]?")


@dataclass(frozen=True, slots=True)
class Term:
    """One dim of a pattern: a name with its mark, an integer, an attribute, an ellipsis, or a product of terms."""

    text: str
    mark: str = ""
    parts: tuple[Term, ...] = ()


@dataclass(frozen=True, slots=True)
class Pattern:
    """The dims of one operand or result."""

    terms: tuple[Term, ...]
    dtype: DType | None = None


@dataclass(frozen=True, slots=True)
class ShardingRule:
    """What splitting one name over a mesh axis means: a placement per operand and per result (`None`: replicated)."""

    name: str
    operands: tuple[Placement | None, ...]
    results: tuple[Placement | None, ...]


@dataclass(frozen=True, slots=True)
class Signature:
    """A parsed signature."""

    text: str
    operands: tuple[Pattern, ...]
    results: tuple[Pattern, ...]

    def infer(self, types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
        """Result types from operand types; trailing operands may be missing. ValueError says which dim disagrees."""
        bound: dict[str, tuple[Dim, ...]] = {}
        for position, (pattern, type_) in enumerate(zip(self.operands, types, strict=False)):
            _bind(pattern, type_.shape, bound, attrs, f"operand {position} of {self.text!r}")
        return tuple(
            TensorType(pattern.dtype or types[0].dtype, _build(pattern, bound, attrs)) for pattern in self.results
        )

    def sharding_rules(self, leading: int = 0) -> tuple[ShardingRule, ...]:
        """One rule per name that may be split, and one for each of `leading` dims that `...` stands for.

        Dims after an ellipsis count from the end.
        """
        rules = [self._leading_rule(dim) for dim in range(leading)]
        for name in dict.fromkeys(t.text for p in self.operands for t in _flat(p) if t.text.isidentifier()):
            if any(t.mark == "^" for p in self.operands for t in _flat(p) if t.text == name):
                continue
            reduced = any(t.mark == "+" for p in self.operands for t in _flat(p) if t.text == name)
            operands = tuple(_place(p, name) for p in self.operands)
            results = tuple(Partial("sum") if reduced else _place(p, name) for p in self.results)
            if reduced or all(r is not None for r in results):
                rules.append(ShardingRule(name, operands, results))
        return tuple(rules)

    def _leading_rule(self, dim: int) -> ShardingRule:
        """Splitting one of the dims under `...`: it is a sum over them that makes a result without them."""
        shard, whole = Shard(dim), Partial("sum")
        operands = tuple(shard if _leads(p) else None for p in self.operands)
        return ShardingRule("...", operands, tuple(shard if _leads(p) else whole for p in self.results))


def _leads(pattern: Pattern) -> bool:
    return bool(pattern.terms) and pattern.terms[0].text == "..."


def _flat(pattern: Pattern) -> list[Term]:
    return [part for term in pattern.terms for part in (term.parts or (term,))]


def _place(pattern: Pattern, name: str) -> Placement | None:
    """Dims are counted from the end when an ellipsis precedes them."""
    count = len(pattern.terms)
    offset = -count if pattern.terms and pattern.terms[0].text == "..." else 0
    for index, term in enumerate(pattern.terms):
        where = index + offset
        if term.text == name:
            return Shard(where)
        for factor, part in enumerate(term.parts):
            if part.text == name:
                return Shard(where, factor)
    return None


def _bind(
    pattern: Pattern, shape: tuple[Dim, ...], bound: dict[str, tuple[Dim, ...]], attrs: Mapping[str, Any], where: str
) -> None:
    terms = pattern.terms
    if terms and terms[0].text == "...":
        lead = len(shape) - (len(terms) - 1)
        if lead < 0:
            raise ValueError(f"{where}: rank {len(shape)} is too small")
        _agree("...", shape[:lead], bound, where)
        terms, shape = terms[1:], shape[lead:]
    if len(terms) != len(shape):
        raise ValueError(f"{where}: rank {len(shape)}, expected {len(terms)}")
    for term, extent in zip(terms, shape, strict=True):
        if term.parts:
            _bind_product(term, extent, bound, attrs, where)
        elif term.text.isidentifier():
            _agree(term.text, (extent,), bound, where)
        elif _known(term, bound, attrs) != extent:
            raise ValueError(f"{where}: extent {extent}, expected {_known(term, bound, attrs)}")


def _bind_product(
    term: Term, extent: Dim, bound: dict[str, tuple[Dim, ...]], attrs: Mapping[str, Any], where: str
) -> None:
    unknown = [p for p in term.parts if p.text.isidentifier() and p.text not in bound]
    known = product(_known(p, bound, attrs) for p in term.parts if p not in unknown)
    rest = divide(extent, known)
    if rest is None or len(unknown) > 1 or (not unknown and rest != 1):
        raise ValueError(f"{where}: {extent} is not ({' '.join(p.text for p in term.parts)})")
    if unknown:
        bound[unknown[0].text] = (rest,)


def _agree(name: str, extents: tuple[Dim, ...], bound: dict[str, tuple[Dim, ...]], where: str) -> None:
    if bound.setdefault(name, extents) != extents:
        raise ValueError(f"{where}: {name} is {list(extents)} here but {list(bound[name])} before")


def _known(term: Term, bound: Mapping[str, tuple[Dim, ...]], attrs: Mapping[str, Any]) -> Dim:
    if term.text.startswith("$"):
        return as_dim(attrs[term.text[1:]])
    return int(term.text) if term.text.isdigit() else bound[term.text][0]


def _build(pattern: Pattern, bound: Mapping[str, tuple[Dim, ...]], attrs: Mapping[str, Any]) -> tuple[Dim, ...]:
    shape: list[Dim] = []
    for term in pattern.terms:
        if term.text == "...":
            shape.extend(bound["..."])
        elif term.parts:
            shape.append(product(_known(p, bound, attrs) for p in term.parts))
        else:
            shape.append(_known(term, bound, attrs))
    return tuple(shape)


def _term(token: str) -> Term:
    if token.startswith("("):
        return Term(token, parts=tuple(_term(t) for t in _TOKEN.findall(token[1:-1])))
    return Term(token[:-1], token[-1]) if token[-1] in "+^" else Term(token)


def _pattern(text: str) -> Pattern:
    body, _, dtype = text.partition(":")
    return Pattern(tuple(map(_term, _TOKEN.findall(body))), DType.parse(dtype.strip()) if dtype else None)


@functools.cache
def parse_signature(text: str) -> Signature:
    """Parse a signature. Raises ValueError where a result uses a name that no operand binds."""
    left, arrow, right = text.partition("->")
    if not arrow:
        raise ValueError(f"no '->' in signature {text!r}")
    signature = Signature(
        text, tuple(map(_pattern, left.split(","))) if left.strip() else (), tuple(map(_pattern, right.split(",")))
    )
    bound = {t.text for p in signature.operands for t in _flat(p)}
    for term in (t for p in signature.results for t in _flat(p)):
        if (term.text.isidentifier() or term.text == "...") and term.text not in bound:
            raise ValueError(f"result dim {term.text!r} is bound by no operand in {text!r}")
    return signature
