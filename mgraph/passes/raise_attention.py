"""Recognise attention: torch's fused op, or matrix products around a softmax; masks become attributes.

    %a = reshape(%k) {shape = (B, 2, 1, S, 16)}
    %b = aten.expand.default(%a) {size = (B, 2, 2, S, 16)}
    %c = reshape(%b) {shape = (B, 4, S, 16)}                   ==>  %out, %lse = attention(%q, %k, %v)
    ...                          # and so for v                       {scale = 0.25, causal = true, window = none}
    %out = aten.scaled_dot_product_attention.default(%q, %c, %d, %mask) {scale = 0.25}

Keys and values that were repeated for the query heads of a group are taken before the repetition. Written out, scores
may be capped (`tanh(x / c) * c`), and may have one more column, the sinks of the heads, which the softmax sums and a
slice drops:

    %e = aten.expand.default(%d) {size = (B, 4, S, 1)}         # d: [1, 4, 1, 1]
    %f = aten.cat.default(%scores, %e) {dim = -1}
    %g = aten.softmax.int(%f) {dim = -1}                  ==>  %out, %lse = attention(%q, %k, %v, %sinks)
    %h = aten.slice.Tensor(%g) {dim = 3, end = S}                         {scale = 0.25, extra = ("sinks")}
    %out = aten.matmul.default(%h, %v)

A mask is read as a predicate (`mgraph.passes.mask`), through the calls of the function if it is a parameter. It may say
causal, a window, that segments are equal, and which keys are seen; one that says more stays, and with it the torch op.
What it knows segments and keys by becomes an operand, and where a caller makes that, a parameter:

    %seen = aten.eq.Tensor(%a, %b)       # a, b: %ids as [B, 1, S, 1] and [B, 1, 1, S]
    %y = call @layer(%x, %seen)                                ==>  %y = call @layer(%x, %ids)

    (in @layer)                                                     %out, %lse = attention(%q, %k, %v, %ids)
    %out = aten.scaled_dot_product_attention.default(%q, %k, %v, %seen)        {extra = ("segments"), ...}

The mask that nothing reads any more goes with the next `dce`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from mgraph.ir.builder import FunctionBuilder, rebuild
from mgraph.ir.graph import AttrValue, Function, Module, Node, Value
from mgraph.ir.opdef import op_def
from mgraph.ir.pattern import ANY, LAST_DIM, NUMBER, Guard, Match, Pattern, capture, either, op, optional_cast, where
from mgraph.passes.base import Report
from mgraph.passes.calls import Source, hand_down, resolve_argument
from mgraph.passes.mask import Predicate, mask_predicate
from mgraph.passes.rewrite import RaisePass, Rule, rewrite

_NO_DROPOUT = where("no dropout", lambda value, node: value in (None, 0, 0.0))
_HIDES = where("a number that hides a score", lambda value, node: isinstance(value, int | float) and value <= -1e4)
_SWAP_LAST_TWO = (0, 1, 3, 2)


def _grouped(name: str) -> Pattern:
    """[B, G, T, D], repeated to [B, H, T, D] or not."""
    column = op("reshape", capture(name), shape=ANY, shared=True, name=f"{name}_column")
    repeated = op("aten.expand.default", column, size=ANY, shared=True, name=f"{name}_expand")
    return either(
        op("reshape", repeated, shape=ANY, shared=True, name=f"{name}_repeated"),
        op("aten.repeat_interleave.self_int", capture(name), repeats=ANY, dim=1, output_size=ANY, shared=True),
        capture(name),
    )


def _fused(*mask: Pattern) -> Pattern:
    return op(
        "aten.scaled_dot_product_attention.default",
        capture("q"),
        _grouped("k"),
        _grouped("v"),
        *mask,
        is_causal=ANY,
        enable_gqa=ANY,
        scale=ANY,
        dropout_p=_NO_DROPOUT,
        name="fused",
    )


def _scores() -> Pattern:
    """The scores of queries and keys: scaled, capped, masked."""
    keys = op("aten.permute.default", _grouped("k"), dims=_SWAP_LAST_TWO, shared=True)
    products = op("aten.matmul.default", capture("q"), keys)
    scaled = either(
        op("aten.mul.Tensor", products, other=NUMBER, name="times"),
        op("aten.div.Tensor", products, other=NUMBER, name="over"),
        products,
    )
    inside = op("aten.div.Tensor", optional_cast(scaled), other=NUMBER, name="cap_inside")
    capped = op("aten.mul.Tensor", op("aten.tanh.default", inside), other=NUMBER, name="cap_outside")
    plain = optional_cast(either(capped, scaled))
    shown = op("aten.bitwise_not.default", capture("mask"), shared=True)
    return either(
        op("aten.masked_fill.Scalar", plain, shown, value=_HIDES),
        op("aten.masked_fill.Scalar", plain, capture("hidden"), value=_HIDES),
        op("aten.where.ScalarOther", capture("mask"), plain, other=_HIDES),
        op("aten.add.Tensor", plain, capture("mask"), commutative=True),
        plain,
    )


def _written_out() -> Pattern:
    weights = optional_cast(op("aten.softmax.int", optional_cast(_scores()), dim=LAST_DIM, dtype=ANY))
    numbers = map(capture, ("seed", "step", "sample"))
    dropped = op("dropout", weights, *numbers, p=ANY, site=ANY, call=ANY, samples=ANY, name="dropout")
    return op("aten.matmul.default", either(optional_cast(dropped), weights), _grouped("v"))


def _dropout(match: Match) -> str | None:
    """The op has no dropout: between softmax and values, the chain stays as it is while the model trains."""
    return f"the weights are dropped with p = {match.attr('dropout', 'p')}" if "dropout" in match.nodes else None


def _written_out_with_sinks() -> Pattern:
    """Sinks are one more column of the scores. Less the maximum of its row, a score has the same softmax."""
    head = either(op("reshape", capture("sinks"), shape=ANY, shared=True), capture("sinks"))
    column = optional_cast(op("aten.expand.default", head, size=ANY, shared=True, name="column"))
    scores = op("aten.cat.default", optional_cast(_scores()), column, dim=LAST_DIM, binds="scores")
    largest = op("aten.max.dim", capture("scores"), dim=LAST_DIM, keepdim=True)
    shifted = either(op("aten.sub.Tensor", scores, largest), scores)
    weights = op("aten.softmax.int", optional_cast(shifted), dim=LAST_DIM, dtype=ANY)
    seen = op("aten.slice.Tensor", optional_cast(weights), dim=LAST_DIM, start=ANY, end=ANY, step=ANY, name="seen")
    return op("aten.matmul.default", optional_cast(seen), _grouped("v"))


def _scale(match: Match) -> float:
    width = match["q"].tensor.shape[-1]
    assert isinstance(width, int), "guarded by _shape"
    if "fused" in match.nodes:
        given = match.attr("fused", "scale")
        return float(width**-0.5 if given is None else given)
    return float(match.attr("times", "other", 1.0)) / float(match.attr("over", "other", 1.0))


def _shape(match: Match) -> str | None:
    """The op takes these shapes, and repetition repeated each head in place."""
    q, k, v = (match[name].tensor for name in ("q", "k", "v"))
    try:
        made = op_def("attention").result_types((q, k, v), {"scale": 1.0})[0]
    except ValueError as error:
        return str(error)
    if not isinstance(q.shape[-1], int):
        return f"the head width of {q} is not a number"
    if made != match.root.result.type:
        return f"the result is {match.root.result.type}, expected {made}"
    for name in ("k", "v"):
        if f"{name}_expand" in match.nodes:
            batch, groups, length, width = match[name].tensor.shape
            repeats = match.nodes[f"{name}_expand"].result.tensor.shape[2:3]
            shapes = (
                match.nodes[f"{name}_column"].result.tensor.shape == (batch, groups, 1, length, width),
                match.nodes[f"{name}_expand"].result.tensor.shape == (batch, groups, *repeats, length, width),
                match.nodes[f"{name}_repeated"].result.tensor.shape == (batch, q.shape[1], length, width),
            )
            if not all(shapes):
                return f"{name} is expanded otherwise than each head for its group"
    return None


def _softcap(match: Match) -> str | None:
    """Scores are divided by what they are multiplied by after the tanh."""
    inside, outside = (match.attr(name, "other") for name in ("cap_inside", "cap_outside"))
    if inside != outside:
        return f"scores are divided by {inside} before the tanh and multiplied by {outside} after it"
    return None if inside is None or inside > 0 else f"scores are capped at {inside}, expected a positive number"


def _sinks(match: Match) -> str | None:
    """One number a head, the same in every row and for every sequence of the batch; its column is the one dropped."""
    if "column" not in match.nodes:
        return None
    start = match.attr("seen", "start", 0)
    if start not in (0, None) or match.attr("seen", "step", 1) != 1:
        return f"weights are taken from column {start!r} on, expected all but the last"
    batch, heads, rows, _ = match["q"].tensor.shape
    (head,), column = match.nodes["column"].operands, match.nodes["column"].result
    if head.tensor.shape == (1, heads, 1, 1) and column.tensor.shape == (batch, heads, rows, 1):
        return None
    return f"sinks {head.type} are expanded to {column.type}, expected one of each of {heads} heads for all rows"


def _dtype(match: Match) -> str | None:
    dtypes = {match[name].tensor.dtype for name in ("q", "k", "v")} | {match.root.result.tensor.dtype}
    return None if len(dtypes) == 1 else f"q, k, v and the result have several dtypes: {sorted(map(repr, dtypes))}"


class _Masks:
    """The masks of one function, each read once; `wanted` are parameters that it lacks, and where they come from."""

    def __init__(self, module: Module, function: Function) -> None:
        self.module = module
        self.function = function
        self.read: dict[tuple[str, Value], Predicate | None] = {}
        self.wanted: dict[Value, Source] = {}

    def of(self, match: Match) -> Predicate | None:
        """What the mask of a match says; `None` where it cannot be read."""
        kind = "hidden" if "hidden" in match.values else "mask"
        key = kind, match[kind]
        if key not in self.read:
            function, value = resolve_argument(self.module, self.function, match[kind])
            if kind == "hidden":
                function, value = _negated(function, value)
            self.read[key] = mask_predicate(function, value)
        return self.read[key]

    def check(self, match: Match) -> str | None:
        """A guard: the mask, if there is one, says what the op can say, and no more."""
        if not {"mask", "hidden"} & set(match.values):
            return None
        mask = match.values.get("hidden") or match["mask"]
        predicate = self.of(match)
        if predicate is None:
            return f"the mask {mask!r} cannot be read"
        if predicate.remainder:
            return f"the mask {mask!r} also depends on {', '.join(predicate.remainder)}"
        if predicate.keys is not None and ("fused" not in match.nodes or predicate.additive):
            return f"the mask {mask!r} may hide all keys of a row, which is 0 only where torch's own op selects by it"
        given = _known_by(predicate)
        types = [value.tensor for value in (match["q"], match["k"], match["v"], *given.values())]
        try:
            op_def("attention").result_types(types, {"scale": 1.0, "extra": tuple(given)})
        except ValueError as error:
            return str(error)
        return None

    def emit(self, builder: FunctionBuilder, match: Match) -> Sequence[Value]:
        """The attention node."""
        causal, window = bool(match.attr("fused", "is_causal", False)), None
        operands, extra = [match["q"], match["k"], match["v"]], []
        if {"mask", "hidden"} & set(match.values):
            predicate = self.of(match)
            assert predicate is not None, "guarded by check"
            causal, window = causal or predicate.causal, predicate.window
            for name, value in _known_by(predicate).items():
                extra.append(name)
                operands.append(self.here(builder, (predicate.function, value)))
        attrs: dict[str, AttrValue] = {"scale": _scale(match), "causal": causal, "window": window}
        if "cap_outside" in match.nodes:
            attrs["softcap"] = float(match.attr("cap_outside", "other"))
        if "column" in match.nodes:
            heads, sinks = match["q"].tensor.shape[1:2], match["sinks"]
            extra.append("sinks")
            if sinks.tensor.shape != heads:
                (sinks,) = builder.emit("reshape", (sinks,), {"shape": heads})
            operands.append(sinks)
        if extra:
            attrs["extra"] = tuple(extra)
        return builder.emit("attention", operands, attrs, names=("attention", "lse"))[:1]

    def here(self, builder: FunctionBuilder, source: Source) -> Value:
        """A value of this function or of one that calls it, here: itself or a parameter."""
        name, value = source
        if name == self.function.name:
            return value
        for param in self.function.params:
            caller, passed = resolve_argument(self.module, self.function, param)
            if (caller.name, passed) == source:
                return param
        for param, known in self.wanted.items():
            if known == source:
                return param
        param = Value(builder.fresh(value.name), value.type)
        self.wanted[param] = source
        return param


def _keys_apart(function: Function) -> Function:
    """The function with keys [B, S, G, D] brought into their order [B, G, S, D] and only then swapped for the product.

    Where nothing stands between the two, as in models without rotation, they came as one permutation.
    """
    merged = {n.result: n for n in function.nodes if n.op == "aten.permute.default" and n.attrs["dims"] == (0, 2, 3, 1)}
    if not merged:
        return function
    builder = rebuild(function, RaiseAttention.name)
    for node in function.nodes:
        if node.op == "aten.matmul.default" and node.operands[1] in merged:
            (rows,) = merged[node.operands[1]].operands
            with builder.at(merged[node.operands[1]]):
                keys = builder.one("aten.permute.default", rows, dims=(0, 2, 1, 3))
                swapped = builder.one("aten.permute.default", keys, dims=_SWAP_LAST_TWO)
            node = replace(node, operands=(node.operands[0], swapped))
        builder.nodes.append(node)
    return builder.build(function.results)


def _known_by(predicate: Predicate) -> dict[str, Value]:
    """The values that a predicate reads, under the names that the op has for them."""
    named = {"segments": predicate.segments, "keys": predicate.keys}
    return {name: value for name, value in named.items() if value is not None}


def _negated(function: Function, value: Value) -> tuple[Function, Value]:
    """The function with one more node: what `value` does not say."""
    shown = Value(f"not {value.name}", value.type)
    node = Node("aten.bitwise_not.default", (value,), (shown,))
    return replace(function, nodes=(*function.nodes, node)), shown


_FUSED = either(_fused(capture("mask")), _fused())
_WRITTEN_OUT = either(_written_out_with_sinks(), _written_out())


@dataclass(frozen=True)
class RaiseAttention(RaisePass):
    """Raise attention."""

    name: ClassVar[str] = "raise-attention"

    def run(self, module: Module, report: Report) -> Module:
        """Rewrite every function, then hand them what their masks know segments and keys by."""
        functions, wanted = dict(module.functions), {}
        for name, function in module.functions.items():
            masks = _Masks(module, function)
            given = _keys_apart(function)
            raised = rewrite(given, _rules(masks), self.name, report)
            functions[name] = function if raised is given else raised
            wanted[name] = masks.wanted
        if all(functions[name] is function for name, function in module.functions.items()):
            return module
        return hand_down(replace(module, functions=functions), wanted)


def _rules(masks: _Masks) -> tuple[Rule, ...]:
    """The rules for one function, whose masks may be made in another."""
    checks = {
        "dropout": _dropout,
        "shape": _shape,
        "dtype": _dtype,
        "softcap": _softcap,
        "sinks": _sinks,
        "mask": masks.check,
    }
    guards = tuple(Guard(name, check) for name, check in checks.items())
    return (
        Rule("attention", _FUSED, ("aten.scaled_dot_product_attention.default",), masks.emit, guards),
        Rule("attention", _WRITTEN_OUT, ("aten.softmax.int",), masks.emit, guards),
    )
