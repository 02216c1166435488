"""Patterns of routers, for raise-moe.

    scores = softmax(logits) or sigmoid(logits)
    %v, %i = topk(scores)                        # or: %i = topk(choice), %v = gather(scores, %i)
    %w = %v / (sum(%v) + epsilon) * scale        # each part optional; or softmax(topk(logits))

`choice` is scores + bias, and with groups of experts the same with -inf outside of the best groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.graph import Value
from mgraph.ir.pattern import ANY, LAST_DIM, NUMBER, Guard, Match, Pattern, capture, either, op, optional_cast, where
from mgraph.ir.types import DType
from mgraph.passes.rewrite import Rule

LAST_OR_NONE = where("the last dim", lambda v, node: v is None or v in (-1, len(node.operands[0].tensor.shape) - 1))
_WIDE = (DType.F32, DType.F64)
_NOTHING = float("-inf")
_LOGITS = capture("logits")
# Other readers of the scores (a loss on the load) keep them.
_SCORES = either(
    op("aten.softmax.int", optional_cast(_LOGITS), dim=LAST_DIM, dtype=ANY, name="softmax", shared=True),
    op("aten.sigmoid.default", optional_cast(_LOGITS), name="sigmoid", shared=True),
)


def _top(values: Pattern, result: int, name: str, binds: str = "") -> Pattern:
    return op("aten.topk.default", values, result=result, k=ANY, dim=LAST_OR_NONE, sorted=ANY, name=name, binds=binds)


def _marks(best: Pattern, name: str) -> Pattern:
    """A tensor of one value, with another at the best groups."""
    base = op("aten.full.default", size=ANY, fill_value=ANY, dtype=ANY, name=f"{name}_base", shared=True)
    return op("reshape", op("aten.scatter.value", base, best, dim=LAST_DIM, value=ANY, name=name), shape=ANY)


def _choice() -> Pattern:
    biased = either(op("aten.add.Tensor", _SCORES, capture("bias"), commutative=True), _SCORES)
    grouped = op("reshape", biased, shape=ANY, name="grouped", shared=True)
    quality = either(
        op("aten.sum.dim_IntList", _top(grouped, 0, "group_best"), dim=LAST_DIM),
        op(("aten.max.dim", "aten.amax.default"), grouped, dim=LAST_DIM, name="group_max"),
    )
    best = _top(quality, 1, "groups")
    closed = op("aten.masked_fill.Scalar", grouped, _marks(best, "closed"), value=_NOTHING)
    spread = op("reshape", op("aten.expand.default", _marks(best, "open"), size=ANY), shape=ANY)
    opened = op(
        "aten.masked_fill.Scalar", biased, op("aten.bitwise_not.default", optional_cast(spread)), value=_NOTHING
    )
    return either(op("reshape", closed, shape=ANY), opened, biased)


def _weights() -> Pattern:
    picked = op("aten.gather.default", _SCORES, _top(_choice(), 1, "topk"), dim=LAST_DIM, binds="values")
    chosen = either(picked, _top(_SCORES, 0, "topk", binds="values"))
    total = op("aten.sum.dim_IntList", chosen, dim=LAST_DIM, keepdim=True, dtype=ANY)
    padded = either(op(("aten.add.Tensor", "aten.add.Scalar"), total, other=NUMBER, name="epsilon"), total)
    normalised = op("aten.div.Tensor", chosen, padded, name="renormalize")
    top_logits = _top(optional_cast(_LOGITS), 0, "topk", binds="values")
    after = op("aten.softmax.int", optional_cast(top_logits), dim=LAST_DIM, dtype=ANY, name="after")
    weights = either(normalised, after, chosen)
    return either(op(("aten.mul.Tensor", "aten.mul.Scalar"), weights, other=NUMBER, name="scale"), weights)


def _dtype(match: Match) -> str | None:
    for name in ("softmax", "sigmoid"):
        if name in match.nodes and match.nodes[name].result.tensor.dtype not in _WIDE:
            return f"the {name} is computed in {match.nodes[name].result.tensor.dtype!r}, expected f32"
    return None


def _shape(match: Match) -> str | None:
    logits = match["logits"].tensor
    if len(logits.shape) != 2:
        return f"the logits are {logits}, expected [tokens, experts]"
    tokens, experts = logits.shape
    if "bias" in match.values and match["bias"].tensor.shape != (experts,):
        return f"the bias is {match['bias'].tensor}, expected one number for each of {experts} experts"
    if "grouped" in match.nodes:
        shape = match.nodes["grouped"].result.tensor.shape
        if len(shape) != 3 or shape[0] != tokens:
            return f"scores are seen as {list(shape)}, expected [tokens, groups, experts of a group]"
    return None


def _groups(match: Match) -> str | None:
    for name, outside in (("closed", 1.0), ("open", 0.0)):
        if name in match.nodes:
            values = float(match.attr(f"{name}_base", "fill_value")), float(match.attr(name, "value"))
            if values != (outside, 1 - outside):
                return f"groups are marked by {values[1]} in {values[0]}, expected {1 - outside} in {outside}"
    return None


def _exports(match: Match) -> tuple[Value, ...]:
    return match.root.results[0], match.nodes["topk"].results[1]


def _attrs(match: Match) -> dict[str, Any]:
    attrs: dict[str, Any] = {
        "top_k": match.attr("topk", "k"),
        "score": "softmax_chosen" if "after" in match.nodes else "sigmoid" if "sigmoid" in match.nodes else "softmax",
        "dtype": match.root.results[0].tensor.dtype,
    }
    if "renormalize" in match.nodes:
        attrs["renormalize"] = True
    for name in ("epsilon", "scale"):
        if name in match.nodes:
            attrs[name] = float(match.attr(name, "other"))
    if "grouped" in match.nodes:
        attrs["groups"] = match.nodes["grouped"].result.tensor.shape[1]
        attrs["top_groups"] = match.attr("groups", "k")
        attrs["group_best"] = match.attr("group_best", "k", 1)
    return attrs


def _emit(builder: FunctionBuilder, match: Match) -> Sequence[Value]:
    operands = [match[name] for name in ("logits", "bias") if name in match.values]
    return builder.emit("moe_route", operands, _attrs(match), names=("weights", "indices"))


ROUTE = Rule(
    "moe_route",
    _weights(),
    ("aten.topk.default",),
    _emit,
    (Guard("shape", _shape), Guard("dtype", _dtype), Guard("groups", _groups)),
    _exports,
)
