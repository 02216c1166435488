"""pad: heads and vocabularies that an axis does not divide become longer by zeros, where the recipe asks for it.

With a vocabulary of 50257 and an axis of 4:

    %x = aten.embedding(%embed.weight, %tokens)                   f32[B, S, 64]
    %logits = aten.linear(%y, %head.weight)                       f32[B*S, 50257]
    %sum, %lse = cross_entropy(%logits, %labels)
==>
    %weight_padded = pad_extent(%embed.weight) {dim = 0, parts = (50257), to = (50260)}
    %x = aten.embedding(%weight_padded, %tokens)                  f32[B, S, 64]
    %weight_padded_1 = pad_extent(%head.weight) {dim = 0, parts = (50257), to = (50260)}
    %logits = aten.linear(%y, %weight_padded_1)                   f32[B*S, 50260]
    %sum, %lse = cross_entropy(%logits, %labels) {classes = 50257}

The states stay those of the model: files, checkpoints, norms and the optimizer know of no padding. No token is of a
padded entry, the loss leaves its logits out, and who else reads logits gets them cut. A padded head has zeros in all
of its weights, also those that read it, so it adds nothing, and its gradients are cut off with the view's.

Of heads there are two ways. If the axis is a multiple of the key/value heads, `repeat-heads` lets ranks share those,
and each group of query heads gets the heads that it misses (2 groups of 7 over 4 ranks: 2 of 8). Else there are more
key/value heads, each with a group of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from mgraph.errors import PassError
from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.dims import Dim, as_dim, divide
from mgraph.ir.graph import Function, Module, Node, Value
from mgraph.ir.types import Shard
from mgraph.passes.base import Pass, Report, Stage, Tier
from mgraph.passes.parallel_sites import NoSite, Walk, heads, vocabulary
from mgraph.passes.widening import Widening


@dataclass(frozen=True)
class _Need:
    """What one node lacks: of `parts`, each in the one before, `to` are wanted. `way`: vocab, groups or within."""

    way: str
    parts: tuple[int, ...]
    to: tuple[int, ...]

    def __str__(self) -> str:
        have, want = (" x ".join(map(str, extents)) for extents in (self.parts, self.to))
        what = {"vocab": "vocabulary", "groups": "key/value heads", "within": "query heads by key/value head"}[self.way]
        return f"{what} {have} -> {want}"


@dataclass(frozen=True)
class Pad(Pass):
    """Pad heads, vocabularies or both for an axis of `size` ranks.

    With `sites` (function:node:way) these are padded, and nothing else, whether they divide or not.
    """

    size: int = 2
    heads: bool = False
    vocab: bool = False
    sites: tuple[str, ...] = ()

    name: ClassVar[str] = "pad"
    stage: ClassVar[Stage] = Stage.DERIVE
    tier: ClassVar[Tier] = Tier.REASSOCIATING
    requires: ClassVar[frozenset[str]] = frozenset({"forward"})

    def __post_init__(self) -> None:
        if self.size < 1:
            raise PassError(f"the axis has size {self.size}", hint="a size of at least 1")

    def on_twin(self, real: Module) -> Pass:
        """The same places: the twin's extents may divide where the model's do not, and the other way round."""
        sites = tuple(
            f"{function.name}:{node.id}:{need.way}"
            for function in real.functions.values()
            for node, need in self._needs(function)
        )
        return replace(self, sites=sites) if sites else replace(self, heads=False, vocab=False)

    def run(self, module: Module, report: Report) -> Module:
        """Rewrite every function that works on what does not divide."""
        functions = dict(module.functions)
        for function in module.functions.values():
            for node, need in self._needs(function):
                try:
                    widening = _widening(functions[function.name], node.id, need)
                except NoSite as why:
                    guard = "every weight around is found"
                    report.near_miss(function.name, node.id, f"{self.name} {need}", guard, str(why))
                    continue
                try:
                    functions[function.name] = widening.function(self.name)
                except NoSite as why:
                    raise _refusal(node, need, str(why)) from why
                report.match(function.name, node.id, f"{need} for {self.size} ranks")
        return replace(module, functions=functions) if report.matches else module

    def _needs(self, function: Function) -> Iterator[tuple[Node, _Need]]:
        """The nodes of a function that something is padded for."""
        for node in function.nodes:
            if node.op == "attention" and self.heads:
                queries, shared = (node.operands[i].tensor.shape[1] for i in (0, 1))
                assert isinstance(queries, int) and isinstance(shared, int), f"{node!r} has an open number of heads"
                ways = [partial(self._groups, shared), partial(self._within, queries // shared, shared)]
            elif node.op in ("aten.embedding.default", "cross_entropy") and self.vocab:
                extent = node.operands[0].tensor.shape[0 if node.op != "cross_entropy" else 1]
                ways = [partial(self._vocabulary, extent)] if isinstance(extent, int) else []
            else:
                continue
            needs = [way(force=False) for way in ways] if not self.sites else [way(force=True) for way in ways]
            for need in needs:
                if need is not None and (not self.sites or f"{function.name}:{node.id}:{need.way}" in self.sites):
                    yield node, need

    def _vocabulary(self, extent: int, *, force: bool) -> _Need | None:
        if extent % self.size == 0 and not force:
            return None
        return _Need("vocab", (extent,), (_above(extent, self.size),))

    def _groups(self, shared: int, *, force: bool) -> _Need | None:
        """More key/value heads."""
        if not force and (shared % self.size == 0 or self.size % shared == 0):
            return None
        return _Need("groups", (shared,), (_above(shared, self.size),))

    def _within(self, each: int, shared: int, *, force: bool) -> _Need | None:
        """More query heads for each of the key/value heads, which ranks share."""
        if self.size % shared != 0 or (each * shared % self.size == 0 and not force):
            return None
        return _Need("within", (shared, each), (shared, _above(each, self.size // shared)))


def _above(extent: int, size: int) -> int:
    """The next multiple of a size."""
    return (extent // size + 1) * size


def _refusal(node: Node, need: _Need, why: str) -> PassError:
    where = node.origin.path or node.id
    flag = "vocab" if need.way == "vocab" else "heads"
    hint = f"a tp that divides {math.prod(need.parts)}, without --pad {flag}"
    return PassError(f"the {need} of {where} cannot be padded: {why}", where=str(node.origin), hint=hint)


def _join(walk: Walk, other: Walk) -> None:
    """Let a walk have what another one has. Raises NoSite where they would split one value in two ways."""
    clash = next((v for v, place in walk.split.items() if other.split.get(v, place) != place), None)
    if clash is not None:
        raise NoSite(f"%{clash.name} would be split both as {walk.split[clash]} and as {other.split[clash]}")
    walk.weights |= other.weights
    walk.split |= other.split
    walk.rules |= other.rules


def _walk(function: Function, node: Node, need: _Need) -> Walk:
    """What becomes longer with a need. Raises NoSite where a weight of it cannot be found."""
    if need.way == "vocab":
        return vocabulary(function, node)
    own, shared = heads(function, node)
    both = next((v for v in own.split if v in shared.split), None)
    if need.way == "groups":
        _join(own, shared)
    elif both is not None:
        raise NoSite(f"%{both.name} makes queries as well as keys or values")
    return own


def _widening(function: Function, site: str, need: _Need) -> Widening:
    """How the function meets one node's need. Raises NoSite where a weight cannot be found."""
    node = next(n for n in function.nodes if n.id == site)
    walk = _walk(function, node, need)
    have, want = math.prod(need.parts), math.prod(need.to)

    def extent(dim: Dim) -> Dim:
        each = divide(dim, have)
        if each is None:
            raise NoSite(f"a dim of {dim} is not made of {have} parts")
        return as_dim(each * want)

    def view(builder: FunctionBuilder, weight: Value, place: Shard) -> Value:
        name = f"{weight.name.rpartition('.')[2]}_padded"
        extent(weight.tensor.shape[place.dim])
        return builder.one("pad_extent", weight, name=name, dim=place.dim, parts=need.parts, to=need.to)

    attrs = {"classes": need.parts[0]} if node.op == "cross_entropy" else {}
    return Widening(walk, {node: attrs}, extent, view, cut=need.way == "vocab")
