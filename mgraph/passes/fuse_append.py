"""fuse-append: the rotation of queries and keys, with the norms before it, in one op with the append to the cache.

    %q1 = rope(permute(rms_norm(%q, %wq)), %cos, %sin)         ==>  %keys, %values, %turned = rope_kv_append(
    %k1 = rope(permute(rms_norm(%k, %wk)), %cos, %sin)                  %cache.k, %cache.v, %q, %k, %v, %slots,
    %keys, %values = kv_append(%cache.k, %cache.v, %k1, …)              %cos, %sin, %wq, %wk) {eps = …}
    %out = paged_attention(%q1, %keys, %values, …)                  %out = paged_attention(%turned, %keys, %values, …)

Queries and keys turn by the same tables; both are normalised alike, or neither. What lies in between is read by nothing
else. It runs before `fuse-rope`, which takes what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from mgraph.ir.builder import FunctionBuilder, rebuild
from mgraph.ir.dims import Dim
from mgraph.ir.graph import Function, Module, Node, Value
from mgraph.ir.opdef import op_def
from mgraph.passes.base import Pass, Report, Stage, Tier

_VIEWS = ("reshape", "aten.permute.default")
_NORM = ("eps", "offset", "round")


class _NoMatch(Exception):
    """Why a place is left as it is."""


@dataclass(frozen=True)
class _Turned:
    """Heads before they are normalised and turned, the views on the way to the rotation, and what the two read."""

    rope: Node
    source: Value
    views: tuple[Node, ...]
    norm: Node | None

    @property
    def options(self) -> dict[str, object]:
        """The attributes of the op that does it."""
        attrs = {"style": op_def("rope").complete(self.rope.attrs)["style"]}
        if self.norm is not None:
            complete = op_def("rms_norm").complete(self.norm.attrs)
            attrs |= {name: complete[name] for name in _NORM}
        return attrs


@dataclass(frozen=True)
class FuseAppend(Pass):
    """Join norms and rotations of queries and keys to the append of the keys."""

    name: ClassVar[str] = "fuse-append"
    stage: ClassVar[Stage] = Stage.FUSE
    tier: ClassVar[Tier] = Tier.REASSOCIATING
    conflicts: ClassVar[frozenset[str]] = frozenset({"in-place"})

    def run(self, module: Module, report: Report) -> Module:
        """Rewrite every function that appends."""
        functions = {name: self._rewritten(function, report) for name, function in module.functions.items()}
        return replace(module, functions=functions)

    def _rewritten(self, function: Function, report: Report) -> Function:
        appends = {n.results[0]: n for n in function.nodes if n.op == "kv_append"}
        if not appends:
            return function
        readers = {n.operands[1]: n for n in function.nodes if n.op == "paged_attention" and n.operands[1] in appends}
        builder = rebuild(function, self.name)
        for node in function.nodes:
            attention = readers.get(node.results[0]) if node.op == "kv_append" else None
            try:
                if attention is None:
                    raise _NoMatch("")
                queries, keys = (_turned(function, v) for v in (attention.operands[0], node.operands[2]))
                _check(function, queries, keys, node)
            except _NoMatch as why:
                builder.keep(node)
                if str(why):
                    report.near_miss(function.name, node.id, "rope_kv_append", str(why))
                continue
            with builder.at(node):
                _emit(builder, node, attention, queries, keys)
            report.match(function.name, node.id, "rotation and append" + ", with norms" * (keys.norm is not None))
        return builder.build(function.results)


def _turned(function: Function, value: Value) -> _Turned:
    """What a value is by views of a rotation. Raises _NoMatch."""
    makers, users = function.producers(), function.users()

    def maker(of: Value, reader: str) -> Node:
        if of not in makers:
            raise _NoMatch(f"what {reader} reads is not made in the function")
        if len(users[of]) != 1:
            raise _NoMatch(f"%{of.name} is read by something else, too")
        return makers[of]

    node = maker(value, "attention")
    while node.op in _VIEWS:
        node = maker(node.operands[0], node.op)
    if node.op != "rope" or node.attrs.get("inverse"):
        raise _NoMatch(f"{node.op} is no rotation")
    rope, views, source = node, list[Node](), node.operands[0]
    while source in makers and makers[source].op == "aten.permute.default":
        views.append(makers[source])
        source = makers[source].operands[0]
    norm = makers.get(source)
    if norm is None or norm.op != "rms_norm" or source is not norm.results[0]:
        return _Turned(rope, rope.operands[0], (), None)
    inner = [v.operands[0] for v in views] + [rope.operands[0]]
    if any(len(users[v]) != 1 for v in inner) or users.get(norm.results[1]):
        return _Turned(rope, rope.operands[0], (), None)
    return _Turned(rope, norm.operands[0], tuple(reversed(views)), norm)


def _check(function: Function, queries: _Turned, keys: _Turned, append: Node) -> None:
    """Raises _NoMatch where the two are not turned alike, or the queries are made too late."""
    if queries.rope.operands[1:] != keys.rope.operands[1:] or queries.options != keys.options:
        raise _NoMatch("queries and keys are not normalised and turned alike")
    tables = [v.tensor.shape for v in keys.rope.operands[1:]]
    tokens = append.operands[2].tensor.shape[0]
    if any(len(s) < 2 or s[-2] != tokens or any(d != 1 for d in s[:-2]) for s in tables):
        raise _NoMatch(f"the tables {list(map(str, tables[0]))} are not a row for each token")
    if any(v.tensor.placement for v in (*append.operands, queries.source, keys.source)):
        raise _NoMatch("the heads lie over several ranks")
    order = {node: index for index, node in enumerate(function.nodes)}
    if order[queries.rope] > order[append]:
        raise _NoMatch("the queries are turned after the append")


def _emit(builder: FunctionBuilder, append: Node, attention: Node, queries: _Turned, keys: _Turned) -> None:
    tokens = append.operands[2].tensor.shape[0]

    def by_token(turned: _Turned) -> Value:
        """[1, H, T, D] of before the norm and the rotation, as [T, H, D]."""
        value = turned.source
        for view in turned.views:
            value = builder.one("aten.permute.default", value, dims=view.attrs["dims"], name="heads")
        value = builder.one("aten.permute.default", value, dims=(0, 2, 1, 3), name="heads")
        return builder.one("reshape", value, shape=value.tensor.shape[1:], name="heads")

    def table(value: Value) -> Value:
        shape: Sequence[Dim] = (tokens, value.tensor.shape[-1])
        return builder.one("reshape", value, shape=tuple(shape), name="table")

    caches, (_, v, slots) = append.operands[:2], append.operands[2:]
    tables = [table(value) for value in keys.rope.operands[1:]]
    weights = [t.norm.operands[1] for t in (queries, keys) if t.norm is not None]
    operands = (*caches, by_token(queries), by_token(keys), v, slots, *tables, *weights)
    names = (*(v.name for v in append.results), "turned")
    made = builder.emit("rope_kv_append", operands, queries.options, names=[builder.fresh(n) for n in names])
    for old, new in zip((*append.results, attention.operands[0]), made, strict=True):
        builder.replace(old, new)
