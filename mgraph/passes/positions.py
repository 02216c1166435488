"""Which ops of a model look at more than one position of a sequence: they need a form over the cache to be served.

An op treats positions alike where it may run on any part of them alone: where some way to split it
(`mgraph.passes.placing`) splits every operand and result that has positions along them. An op without such a way would
see tokens of other requests. Nor may one compute with the number of positions, which in a step is that of the tokens of
all requests.
"""

from __future__ import annotations

import sympy

from mgraph.ir.dims import Dim, names_in
from mgraph.ir.graph import Node, Value
from mgraph.ir.types import PendingType, Shard
from mgraph.passes.placing import is_pointwise, rules_of

_BY_ROW = ("moe_route", "moe_drop_padding", "moe_dispatch", "grouped_matmul", "moe_combine")
"""Ops that order rows, and make each row of what they give from one row alone."""
_ALONG = {
    "aten._log_softmax.default",
    "aten._softmax.default",
    "aten.argmax.default",
    "aten.cumsum.default",
    "aten.gather.default",
    "aten.log_softmax.int",
    "aten.max.dim",
    "aten.mean.dim",
    "aten.amax.default",
    "aten.repeat_interleave.self_int",
    "aten.select.int",
    "aten.softmax.int",
    "aten.sort.default",
    "aten.sort.stable",
    "aten.stack.default",
    "aten.topk.default",
    "aten.unbind.int",
}
"""Ops of torch that work along the dims that their attribute `dim` names, and treat all others alike."""
_LAST = {"aten.topk.default": -1, "aten.sort.default": -1, "aten.sort.stable": -1}
_LOOKUPS = {"aten.embedding.default"}
_ROWS = {"aten.addmm.default": 1}
"""Ops that make each row of a product of one row of this operand."""
_EXTENTS = ("shape", "size", "sizes", "start", "end", "length", "repeats")
"""Attributes that say how large something is, or which part of it."""
_EQUAL = ("aten.full.", "aten.ones.", "aten.zeros.", "aten.empty.", "aten.scalar_tensor.")


def position_dims(value: Value, name: str) -> list[int]:
    """The dims of a value whose extent speaks of the positions, which are the named dim `name`."""
    type_ = value.type.value if isinstance(value.type, PendingType) else value.type
    return [i for i, extent in enumerate(type_.shape) if name in names_in(extent)]


def mixes_positions(node: Node, name: str) -> str | None:
    """Why a node cannot run on the positions `name` of several sequences together; None where it can."""
    read = [(i, dims) for i, v in enumerate(node.operands) if (dims := position_dims(v, name))]
    made = [(i, dims) for i, v in enumerate(node.results) if (dims := position_dims(v, name))]
    if node.op == "call" or node.op in _BY_ROW or not (read or made):
        return None
    if any(len(dims) > 1 for _, dims in (*read, *made)):
        return "relates every position to every other"
    if not read:
        alike = node.op.startswith(_EQUAL) or is_spread(node)
        return None if alike else "numbers the tokens of a batch"
    if node.op in _LOOKUPS:
        return None if [i for i, _ in read] == [1] else "looks positions up"
    if node.op in _ROWS:
        return None if read == [(_ROWS[node.op], [0])] else "multiplies positions"
    if node.op in _ALONG:
        return _along(node, read[0][1][0])
    split = {("operand", i): dims[0] for i, dims in read} | {("result", i): dims[0] for i, dims in made}
    for rule in rules_of(node, 1):
        placed = {("operand", i): p for i, p in enumerate(rule.operands) if p is not None}
        placed |= {("result", i): p for i, p in enumerate(rule.results) if p is not None}
        if placed.keys() == split.keys() and all(p == Shard(split[k]) for k, p in placed.items()):
            return None
    return "works across positions"


def computes_with_length(node: Node, name: str) -> bool:
    """Whether the number of positions `name` is a number for a node, other than that of what it makes."""
    return any(key not in _EXTENTS and _mentions(value, name) for key, value in node.attrs.items())


def _mentions(value: object, name: str) -> bool:
    """Whether an attribute is, or has in it, an expression of the named dim."""
    if isinstance(value, tuple):
        return any(_mentions(each, name) for each in value)
    return isinstance(value, sympy.Expr) and name in names_in(value)


def is_spread(node: Node) -> bool:
    """Whether a result repeats, along new dims, what an operand has."""
    return node.op in ("reshape", "aten.expand.default") or ("." in node.op and is_pointwise(node.op))


def _along(node: Node, position: int) -> str | None:
    given = node.attrs.get("dim", _LAST.get(node.op, 0))
    rank = max(len(v.tensor.shape) for v in (*node.operands, *node.results))
    dims: tuple[Dim, ...] = given if isinstance(given, tuple) else (given,)
    works = {int(str(dim)) % rank for dim in dims if dim is not None}
    if node.op == "aten.stack.default":
        return None
    return "works along positions" if position in works or not works else None
