"""Recognise attention: torch's fused op, or matrix products around a softmax; masks become attributes.

    %a = reshape(%k) {shape = (B, 2, 1, S, 16)}
    %b = aten.expand.default(%a) {size = (B, 2, 2, S, 16)}
    %c = reshape(%b) {shape = (B, 4, S, 16)}                   ==>  %out, %lse = attention(%q, %k, %v)
    ...                          # and so for v                       {scale = 0.25, causal = true, window = none}
    %out = aten.scaled_dot_product_attention.default(%q, %c, %d, %mask) {scale = 0.25}

Keys and values that were repeated for the query heads of a group are taken before the repetition. A mask is read as a
predicate (`mgraph.passes.mask`), through the calls of the function if it is a parameter; a mask that says more than
causal and window stays, and with it the torch op. The mask that nothing reads any more goes with the next `dce`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.graph import Function, Module, Node, Value
from mgraph.ir.opdef import op_def
from mgraph.ir.pattern import ANY, LAST_DIM, NUMBER, Guard, Match, Pattern, capture, either, op, optional_cast, where
from mgraph.passes.calls import resolve_argument
from mgraph.passes.mask import Predicate, mask_predicate
from mgraph.passes.rewrite import RaisePass, Rule

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


def _written_out() -> Pattern:
    keys = op("aten.permute.default", _grouped("k"), dims=_SWAP_LAST_TWO, shared=True)
    scores = op("aten.matmul.default", capture("q"), keys)
    scaled = either(
        op("aten.mul.Tensor", scores, other=NUMBER, name="times"),
        op("aten.div.Tensor", scores, other=NUMBER, name="over"),
        scores,
    )
    masked = either(
        op("aten.masked_fill.Scalar", scaled, capture("hidden"), value=_HIDES),
        op("aten.where.ScalarOther", capture("mask"), scaled, other=_HIDES),
        op("aten.add.Tensor", scaled, capture("mask"), commutative=True),
        scaled,
    )
    weights = op("aten.softmax.int", optional_cast(masked), dim=LAST_DIM, dtype=ANY)
    return op("aten.matmul.default", optional_cast(weights), _grouped("v"))


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


def _dtype(match: Match) -> str | None:
    dtypes = {match[name].tensor.dtype for name in ("q", "k", "v")} | {match.root.result.tensor.dtype}
    return None if len(dtypes) == 1 else f"q, k, v and the result have several dtypes: {sorted(map(repr, dtypes))}"


class _Masks:
    """The masks of one function, each read once."""

    def __init__(self, module: Module, function: Function) -> None:
        self.module = module
        self.function = function
        self.read: dict[tuple[str, Value], Predicate | None] = {}

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
        """A guard: the mask, if there is one, says causal and window and no more."""
        if not {"mask", "hidden"} & set(match.values):
            return None
        mask = match.values.get("hidden") or match["mask"]
        predicate = self.of(match)
        if predicate is None:
            return f"the mask {mask!r} cannot be read"
        more = [f"{v!r}" for v in (predicate.segments, predicate.keys) if v is not None]
        more += predicate.remainder
        return f"the mask {mask!r} also depends on {', '.join(more)}" if more else None

    def emit(self, builder: FunctionBuilder, match: Match) -> Sequence[Value]:
        """The attention node."""
        causal, window = bool(match.attr("fused", "is_causal", False)), None
        if {"mask", "hidden"} & set(match.values):
            predicate = self.of(match)
            assert predicate is not None, "guarded by check"
            causal, window = causal or predicate.causal, predicate.window
        attrs = {"scale": _scale(match), "causal": causal, "window": window}
        operands = (match["q"], match["k"], match["v"])
        return builder.emit("attention", operands, attrs, names=("attention", "lse"))[:1]


def _negated(function: Function, value: Value) -> tuple[Function, Value]:
    """The function with one more node: what `value` does not say."""
    shown = Value(f"not {value.name}", value.type)
    node = Node("aten.bitwise_not.default", (value,), (shown,))
    return replace(function, nodes=(*function.nodes, node)), shown


_FUSED = either(_fused(capture("mask")), _fused())
_WRITTEN_OUT = _written_out()


@dataclass(frozen=True)
class RaiseAttention(RaisePass):
    """Raise attention."""

    name: ClassVar[str] = "raise-attention"

    def rules(self, module: Module, function: Function) -> Sequence[Rule]:
        """Masks are read in the functions that make them, which differ from function to function."""
        masks = _Masks(module, function)
        guards = (Guard("shape", _shape), Guard("dtype", _dtype), Guard("mask", masks.check))
        return (
            Rule("attention", _FUSED, ("aten.scaled_dot_product_attention.default",), masks.emit, guards),
            Rule("attention", _WRITTEN_OUT, ("aten.softmax.int",), masks.emit, guards),
        )
