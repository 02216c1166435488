"""One form for each computation that torch can write in many ways; nothing changes bitwise.

    %b = aten.view.default(%a) {size = (B, S, -1, 16)}         %b = reshape(%a) {shape = (B, S, 4, 16)}
    %c = aten.transpose.int(%b) {dim0 = 1, dim1 = 2}     ==>   %c = aten.permute.default(%b) {dims = (0, 2, 1, 3)}
    %d = aten.contiguous.default(%c)                           %f = cast(%c) {dtype = bf16}
    %e = aten.to.dtype(%d) {dtype = f32}  (it is f32)
    %f = aten.to.dtype(%e) {dtype = bf16}

The forms that later passes see:

* `cast {dtype}` for every change of dtype; casts to the same dtype vanish, a lossless cast is skipped by the next one;
* `reshape {shape}` for view, flatten, unsqueeze, squeeze, …, with no -1; reshapes of reshapes are one;
* `aten.permute.default {dims}` for transpose, t, …; permutes of permutes are one, identities vanish;
* `aten.expand.default {size}` with the whole shape; expands of expands are one, identities vanish;
* `aten.slice.Tensor {dim, start, end, step}` for slice, narrow, chunk and split; dims and starts are counted from the
  front, an end at or past the extent is left out, whole slices vanish; defaults (0, 0, none, 1) are left out;
* `aten.full.default {size, fill_value, dtype}` for zeros, ones, new_ones, full_like, scalar_tensor, …;
* `aten.bitwise_and.Tensor`, `bitwise_or`, `bitwise_not` for the logical and operator forms on bools;
* a commutative op of two tensors has the one with more dims first (`mul(x, weight)`);
* contiguous, clone, alias, dropout that drops nothing, `* 1`, `/ 1`, integer `+ 0` and a cat of one vanish.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import sympy

from mgraph.ir.builder import FunctionBuilder, rebuild
from mgraph.ir.dims import Dim, as_dim
from mgraph.ir.graph import Function, Module, Node, Value
from mgraph.ir.types import DType, PendingType
from mgraph.passes.base import Pass, Report, Stage
from mgraph.passes.keys import attrs_key

_CAST = {"aten.to.dtype", "aten.to.dtype_layout", "aten.to.device", "aten._to_copy.default", "aten.type_as.default"}
_SAME = {
    "aten.alias.default",
    "aten.clone.default",
    "aten.contiguous.default",
    "aten.lift_fresh_copy.default",
    "aten.to.other",
}
_RESHAPE = {
    "aten.view.default",
    "aten._unsafe_view.default",
    "aten.reshape.default",
    "aten.flatten.using_ints",
    "aten.unflatten.int",
    "aten.unsqueeze.default",
    "aten.squeeze.default",
    "aten.squeeze.dim",
    "aten.squeeze.dims",
    "aten.view_as.default",
    "aten.reshape_as.default",
}
_FILL = {
    "aten.zeros.default": 0,
    "aten.ones.default": 1,
    "aten.new_zeros.default": 0,
    "aten.new_ones.default": 1,
    "aten.zeros_like.default": 0,
    "aten.ones_like.default": 1,
    "aten.full.default": None,
    "aten.new_full.default": None,
    "aten.full_like.default": None,
    "aten.scalar_tensor.default": None,
}
_LOGIC = {
    "aten.__and__.Tensor": "aten.bitwise_and.Tensor",
    "aten.logical_and.default": "aten.bitwise_and.Tensor",
    "aten.__or__.Tensor": "aten.bitwise_or.Tensor",
    "aten.logical_or.default": "aten.bitwise_or.Tensor",
    "aten.logical_not.default": "aten.bitwise_not.default",
}
_COMMUTATIVE = {
    "aten.add.Tensor",
    "aten.mul.Tensor",
    "aten.eq.Tensor",
    "aten.ne.Tensor",
    "aten.maximum.default",
    "aten.minimum.default",
    "aten.bitwise_and.Tensor",
    "aten.bitwise_or.Tensor",
}
# Bits of precision and of exponent: a cast loses nothing where neither shrinks.
_FLOATS = {DType.F64: (53, 11), DType.F32: (24, 8), DType.BF16: (8, 8), DType.F16: (11, 5)}
_INTEGERS = {DType.I64: 63, DType.I32: 31, DType.I16: 15, DType.I8: 7}


@dataclass(frozen=True)
class Canonicalize(Pass):
    """Bring captured ops to the normal forms listed in this file."""

    name: ClassVar[str] = "canonicalize"
    stage: ClassVar[Stage] = Stage.NORMALIZE
    provides: ClassVar[frozenset[str]] = frozenset({"canonical"})

    def run(self, module: Module, report: Report) -> Module:
        """Rewrite every function once, from top to bottom."""
        functions = {name: _function(function, report) for name, function in module.functions.items()}
        changed = any(functions[name] is not f for name, f in module.functions.items())
        return replace(module, functions=functions) if changed else module


@dataclass(slots=True)
class _Place:
    """Where a rule works: the builder and what has been made so far."""

    builder: FunctionBuilder
    producers: dict[Value, Node]

    def maker(self, value: Value, op: str) -> Node | None:
        """The node that made a value, if it is of this op."""
        node = self.producers.get(value)
        return node if node is not None and node.op == op else None


def _function(function: Function, report: Report) -> Function:
    builder = rebuild(function, Canonicalize.name)
    place = _Place(builder, {})
    changed = False
    for old in function.nodes:
        operands = tuple(builder.value(v) for v in old.operands)
        node = old if operands == old.operands else replace(old, operands=operands)
        outcome = _canonical(node, place)
        if isinstance(outcome, Value):
            builder.replace(node.result, outcome)
            report.count("removed")
            changed = True
            continue
        for made in outcome:
            builder.nodes.append(made)
            place.producers.update((v, made) for v in made.results)
        if len(outcome) != 1 or outcome[0] is not node:
            report.count("rewritten")
            changed = True
    return builder.build(function.results) if changed else function


def _canonical(node: Node, place: _Place) -> Value | Sequence[Node]:
    """The value that stands for the node's, or the nodes that take its place."""
    if any(isinstance(v.type, PendingType) for v in (*node.operands, *node.results)):
        return (node,)
    parts = _parts(node)
    if parts is not None:
        done = [_canonical(part, place) for part in parts]
        # A part that is the whole keeps its name through a reshape to its own shape, dropped by the next run.
        return [n for part, d in zip(parts, done, strict=True) for n in ((part,) if isinstance(d, Value) else d)]
    node = _normal_op(node)
    rule = _RULES.get(node.op)
    outcome = rule(node, place) if rule is not None else node
    return outcome if isinstance(outcome, Value) else (outcome,)


def _make(node: Node, op: str, operands: Sequence[Value], attrs: Mapping[str, Any]) -> Node:
    """The same value by another op; the node itself where nothing differs."""
    if op == node.op and tuple(operands) == node.operands and attrs_key(attrs) == attrs_key(node.attrs):
        return node
    return replace(node, op=op, operands=tuple(operands), attrs=dict(attrs), made_by=Canonicalize.name)


def _normal_op(node: Node) -> Node:
    """The one op for the many spellings; rules then look at that op alone."""
    op = node.op
    attrs: Mapping[str, Any] = node.attrs
    if op in _SAME or op in _CAST:
        dtype = node.result.tensor.dtype
        return _make(node, "cast", node.operands[:1], {"dtype": dtype})
    if op in _RESHAPE:
        return _make(node, "reshape", node.operands[:1], {"shape": node.result.tensor.shape})
    if op in _FILL:
        fill = _FILL[op] if _FILL[op] is not None else attrs.get("fill_value", attrs.get("s"))
        type_ = node.result.tensor
        if not isinstance(fill, int | float):
            return node  # a size or a static: its number is not known here
        fill = bool(fill) if type_.dtype is DType.BOOL else float(fill) if type_.dtype.is_float else fill
        return _make(node, "aten.full.default", (), {"size": type_.shape, "fill_value": fill, "dtype": type_.dtype})
    if op in _LOGIC and all(v.tensor.dtype is DType.BOOL for v in node.operands):
        return _make(node, _LOGIC[op], node.operands, attrs)
    dims = _permutation(node)
    if dims is not None:
        return _make(node, "aten.permute.default", node.operands, {"dims": dims})
    if op == "aten.expand_as.default":
        return _make(node, "aten.expand.default", node.operands[:1], {"size": node.result.tensor.shape})
    if op == "aten.narrow.default" and isinstance(attrs["start"], int):
        dim, length = attrs["dim"], node.result.tensor.shape[attrs["dim"]]
        start = _front(attrs["start"], node.operands[0].tensor.shape[dim])
        return _make(node, "aten.slice.Tensor", node.operands, _slice(dim, start, as_dim(start + length)))
    if op == "aten.square.default":
        return _make(node, "aten.pow.Tensor_Scalar", node.operands, {"exponent": 2})
    return node


def _permutation(node: Node) -> tuple[int, ...] | None:
    attrs: Mapping[str, Any] = node.attrs
    if not node.operands:
        return None
    rank = len(node.operands[0].tensor.shape)
    order = list(range(rank))
    if node.op == "aten.permute.default":
        return tuple(d % rank for d in attrs["dims"])
    if node.op in ("aten.transpose.int", "aten.swapaxes.default"):
        a, b = attrs.get("dim0", attrs.get("axis0")), attrs.get("dim1", attrs.get("axis1"))
        order[a], order[b] = order[b], order[a]
        return tuple(order)
    if node.op in ("aten.t.default", "aten.numpy_T.default", "aten.mT.default"):
        return (*order[:-2], *order[-2:][::-1]) if node.op == "aten.mT.default" else tuple(reversed(order))
    return None


def _parts(node: Node) -> list[Node] | None:
    """Chunk and split as one slice per result."""
    if node.op not in ("aten.chunk.default", "aten.split.Tensor", "aten.split_with_sizes.default"):
        return None
    rank = len(node.operands[0].tensor.shape)
    dim = int(node.attrs.get("dim", 0)) % rank  # type: ignore[arg-type]
    start: Dim = 0
    parts = []
    for value in node.results:
        end = as_dim(start + value.tensor.shape[dim])
        attrs = _slice(dim, start, end)
        parts.append(replace(node, op="aten.slice.Tensor", attrs=attrs, results=(value,), made_by=Canonicalize.name))
        start = end
    return parts


def _slice(dim: int, start: Dim, end: Dim | None, step: int = 1) -> dict[str, Any]:
    """The attributes of a slice without those at their defaults."""
    attrs: dict[str, Any] = {"dim": dim, "start": start, "end": end, "step": step}
    defaults = {"dim": 0, "start": 0, "end": None, "step": 1}
    return {name: value for name, value in attrs.items() if value != defaults[name]}


def _front(index: Dim, extent: Dim) -> Dim:
    """An index counted from the front."""
    return as_dim(index + extent) if isinstance(index, int) and index < 0 else index


def _lossless(source: DType, target: DType) -> bool:
    """Whether every value of `source` is one of `target`."""
    if source in _FLOATS and target in _FLOATS:
        return all(a <= b for a, b in zip(_FLOATS[source], _FLOATS[target], strict=True))
    if source in _INTEGERS and target in _INTEGERS:
        return _INTEGERS[source] <= _INTEGERS[target]
    return source is target or (source is DType.BOOL and (target in _FLOATS or target in _INTEGERS))


def _rule_cast(node: Node, place: _Place) -> Value | Node:
    source = node.operands[0]
    inner = place.maker(source, "cast")
    if inner is not None and _lossless(inner.operands[0].tensor.dtype, source.tensor.dtype):
        source = inner.operands[0]
    if source.tensor.dtype is node.attrs["dtype"]:
        return source
    return _make(node, "cast", (source,), node.attrs)


def _rule_reshape(node: Node, place: _Place) -> Value | Node:
    source = node.operands[0]
    inner = place.maker(source, "reshape")
    if inner is not None:
        source = inner.operands[0]
    if source.tensor.shape == node.result.tensor.shape:
        return source
    return _make(node, "reshape", (source,), {"shape": node.result.tensor.shape})


def _rule_permute(node: Node, place: _Place) -> Value | Node:
    source, dims = node.operands[0], node.attrs["dims"]
    inner = place.maker(source, "aten.permute.default")
    if inner is not None:
        dims = tuple(inner.attrs["dims"][d] for d in dims)  # type: ignore[index, union-attr]
        source = inner.operands[0]
    if dims == tuple(range(len(source.tensor.shape))):
        return source
    return _make(node, "aten.permute.default", (source,), {"dims": dims})


def _rule_expand(node: Node, place: _Place) -> Value | Node:
    source = node.operands[0]
    inner = place.maker(source, "aten.expand.default")
    if inner is not None:
        source = inner.operands[0]
    shape = node.result.tensor.shape
    return source if source.tensor.shape == shape else _make(node, node.op, (source,), {"size": shape})


def _rule_slice(node: Node, place: _Place) -> Value | Node:
    source = node.operands[0]
    shape = source.tensor.shape
    attrs: Mapping[str, Any] = node.attrs
    dim = attrs.get("dim", 0) % len(shape)
    extent, step = shape[dim], attrs.get("step", 1)
    start, end = _front(attrs.get("start") or 0, extent), attrs.get("end")
    if end is not None:
        end = _front(end, extent)
        if end == extent or _at_least(end, extent):
            end = None
    if end is None and start == 0 and step == 1:
        return source
    inner = place.maker(source, "aten.slice.Tensor")
    same = inner is not None and (inner.attrs.get("dim", 0), inner.attrs.get("step", 1), step) == (dim, 1, 1)
    # An end that may lie past the extent is cut off there: it says nothing about the outer tensor.
    if inner is not None and same and (end is None or _at_least(extent, end)):
        before: Any = inner.attrs.get("start", 0)
        end = inner.attrs.get("end") if end is None else as_dim(before + end)
        start, source = as_dim(before + start), inner.operands[0]
    return _make(node, node.op, (source,), _slice(dim, start, end, step))


def _at_least(end: Dim, extent: Dim) -> bool:
    if isinstance(end, int) and end >= 2**62:
        return True
    difference = sympy.sympify(end) - extent
    return bool(difference.is_nonnegative)


def _rule_identity(number: int, floats: bool) -> Callable[[Node, _Place], Value | Node]:
    """`x op number` is `x`; for floats only where `floats` (adding 0 turns -0.0 into 0.0)."""

    def rule(node: Node, place: _Place) -> Value | Node:
        if len(node.operands) == 1 and "rounding_mode" not in node.attrs:
            source = node.operands[0]
            other = node.attrs.get("other")
            is_number = isinstance(other, int | float) and other == number
            if is_number and source.type == node.result.type and (floats or not source.tensor.dtype.is_float):
                return source
        return _rule_order(node, place)

    return rule


def _rule_order(node: Node, place: _Place) -> Node:
    """Of two tensors, the one with more dims first."""
    if node.op in _COMMUTATIVE and len(node.operands) == 2 and not node.attrs:
        a, b = node.operands
        if len(a.tensor.shape) < len(b.tensor.shape):
            return _make(node, node.op, (b, a), node.attrs)
    return node


def _rule_dropout(node: Node, place: _Place) -> Value | Node:
    return node.operands[0] if node.attrs["p"] == 0 or not node.attrs["train"] else node


def _rule_cat(node: Node, place: _Place) -> Value | Node:
    return node.operands[0] if len(node.operands) == 1 else node


_RULES: dict[str, Callable[[Node, _Place], Value | Node]] = {
    "cast": _rule_cast,
    "reshape": _rule_reshape,
    "aten.permute.default": _rule_permute,
    "aten.expand.default": _rule_expand,
    "aten.slice.Tensor": _rule_slice,
    "aten.mul.Tensor": _rule_identity(1, floats=True),
    "aten.mul.Scalar": _rule_identity(1, floats=True),
    "aten.div.Tensor": _rule_identity(1, floats=True),
    "aten.div.Scalar": _rule_identity(1, floats=True),
    "aten.add.Tensor": _rule_identity(0, floats=False),
    "aten.add.Scalar": _rule_identity(0, floats=False),
    "aten.sub.Tensor": _rule_identity(0, floats=False),
    "aten.sub.Scalar": _rule_identity(0, floats=False),
    "aten.dropout.default": _rule_dropout,
    "aten.cat.default": _rule_cat,
} | dict.fromkeys(_COMMUTATIVE - {"aten.add.Tensor", "aten.mul.Tensor"}, _rule_order)
