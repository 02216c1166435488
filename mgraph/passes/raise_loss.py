"""Recognise cross entropy summed over tokens.

    %a: f32[T, V] = cast(%logits) {dtype = f32}                           ==>  %sum, %lse = cross_entropy(
    %sum = aten.cross_entropy_loss.default(%a, %labels) {reduction = 2}          %logits, %labels) {ignore_index = -100}

The upcast goes, also from under a reshape: the op computes in f32 whatever the dtype of the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.graph import Function, Module, Value
from mgraph.ir.pattern import ANY, Guard, Match, capture, either, op, optional_cast, where
from mgraph.ir.types import DType
from mgraph.passes.rewrite import RaisePass, Rule

_LOGITS = capture("logits")
_SUM = where("2 (the sum)", lambda value, node: value == 2)
_FLAT = either(
    op("reshape", op("cast", _LOGITS, dtype=ANY, shared=True), shape=ANY, shared=True),
    optional_cast(_LOGITS),
)


def _shape(match: Match) -> str | None:
    rows = match.root.operands[0].tensor
    return None if len(rows.shape) == 2 else f"the logits are {rows}, expected [tokens, vocabulary]"


def _dtype(match: Match) -> str | None:
    dtype = match.root.result.tensor.dtype
    return None if dtype is DType.F32 else f"it is computed in {dtype!r}, expected f32"


def _emit(builder: FunctionBuilder, match: Match) -> Sequence[Value]:
    rows = match.root.operands[0].tensor
    logits = match["logits"]
    if logits.tensor.shape != rows.shape:
        logits = builder.one("reshape", logits, shape=rows.shape)
    attrs = {"ignore_index": match.attr("loss", "ignore_index", -100)}
    return builder.emit("cross_entropy", (logits, match["labels"]), attrs, names=("cross_entropy", "lse"))[:1]


_RULE = Rule(
    "cross_entropy",
    op("aten.cross_entropy_loss.default", _FLAT, capture("labels"), reduction=_SUM, ignore_index=ANY, name="loss"),
    ("aten.cross_entropy_loss.default",),
    _emit,
    (Guard("shape", _shape), Guard("dtype", _dtype)),
)


@dataclass(frozen=True)
class RaiseLoss(RaisePass):
    """Raise cross entropy."""

    name: ClassVar[str] = "raise-loss"

    def rules(self, module: Module, function: Function) -> Sequence[Rule]:
        """The same rule everywhere."""
        return (_RULE,)
