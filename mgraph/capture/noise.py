"""Dropout and random numbers of a trace become ops that draw by counter (`mgraph.ir.ops.random`).

    aten.dropout(x, 0.1, True)            ==>  dropout(x, @rng.seed, @rng.step, @rng.sample) {p = 0.1, site = …}
    aten.rand_like(x)                     ==>  random(@rng.seed, …) {shape = …}
    aten.uniform_(x, 0.9, 1.1)            ==>  random(…) * 0.2 + 0.9
    aten.scaled_dot_product_attention     ==>  products around a softmax, and dropout between
      with dropout

A place is known by its module path: `site` with `*` for the layer, `call` the layer's number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from mgraph.capture.unsupported import argument, op_name
from mgraph.errors import CaptureError
from mgraph.ir.dims import Dim, divide
from mgraph.ir.graph import Origin, State, StateKind, Value
from mgraph.ir.ops.random import STATES, place, sequences_in
from mgraph.ir.types import DType, TensorType

DROPOUT, ATTENTION = "aten.dropout.default", "aten.scaled_dot_product_attention.default"
UNIFORM = "aten.uniform_.default"
_OTHERS = frozenset({"aten.rand_like.default", "aten.rand.default"})

Emit = Callable[[str, Sequence[Value], dict[str, Any], Sequence[TensorType] | None, Sequence[str] | None], Any]


def draws(node: Any) -> bool:
    """Whether a node of a trace draws random numbers that have a form here; attention does with dropout only."""
    name = op_name(node)
    return name in _OTHERS or name == DROPOUT or (name == ATTENTION and bool(argument(node, 4, "dropout_p", 0.0)))


class Noise:
    """The random ops of one import: their states, made on first use, and their places."""

    def __init__(self, emit: Emit, state: dict[str, State], origin: Callable[[], Origin]) -> None:
        self._emit, self._state, self._origin = emit, state, origin
        self._seen: Counter[tuple[str, int]] = Counter()

    def dropout(self, x: Value, p: float) -> Value:
        """`x`, dropped with probability p."""
        return self._drawn("dropout", [x], {"p": float(p)}, x.tensor)

    def uniform(self, type_: TensorType, low: float = 0.0, high: float = 1.0) -> Value:
        """Uniform numbers in [low, high)."""
        made = self._drawn("random", [], {"shape": type_.shape, "dtype": type_.dtype}, type_)
        if high - low != 1.0:
            made = self._one("aten.mul.Tensor", [made], other=high - low)
        return self._one("aten.add.Tensor", [made], other=low) if low else made

    def attention(self, operands: Sequence[Value], attrs: dict[str, Any]) -> Value:
        """Attention with dropout on its weights: q, k, v and an optional mask (bool: seen, or added)."""
        q, k, v, *mask = operands
        heads, groups = q.tensor.shape[1], k.tensor.shape[1]
        if attrs.get("enable_gqa") and heads != groups:
            repeats = divide(heads, groups)
            k, v = (self._one("aten.repeat_interleave.self_int", [t], repeats=repeats, dim=1) for t in (k, v))
        width = q.tensor.shape[-1]
        scale = attrs.get("scale")
        scores = self._one("aten.matmul.default", [q, self._one("aten.transpose.int", [k], dim0=-2, dim1=-1)])
        scores = self._one("aten.mul.Tensor", [scores], other=float(width) ** -0.5 if scale is None else scale)
        if attrs.get("is_causal"):
            size = (q.tensor.shape[-2], k.tensor.shape[-2])
            mask = [self._one("aten.tril.default", [self._one("aten.ones.default", [], size=size, dtype=DType.BOOL)])]
        for seen in mask:
            if seen.tensor.dtype is DType.BOOL:
                scores = self._one("aten.where.ScalarOther", [seen, scores], other=float("-inf"))
            else:
                scores = self._one("aten.add.Tensor", [scores, seen])
        weights = self._one("aten.softmax.int", [scores], dim=-1)
        return self._one("aten.matmul.default", [self.dropout(weights, attrs["dropout_p"]), v])

    def _one(self, op: str, operands: Sequence[Value], **attrs: Any) -> Value:
        made: Value = self._emit(op, operands, attrs, None, None)[0]
        return made

    def _drawn(self, op: str, operands: list[Value], attrs: dict[str, Any], type_: TensorType) -> Value:
        scalar = TensorType(DType.I64)
        for name, init in STATES.items():
            if name not in self._state:
                self._state[name] = State.make(name, scalar, StateKind.SCALAR, init=init, persist=False)
        numbers = [self._state[name].value for name in STATES]
        attrs |= {**self._place(), "samples": self._samples(type_.shape)}
        return self._one(op, [*operands, *numbers], **attrs)

    def _place(self) -> dict[str, Any]:
        site, call = place(self._origin().path)
        index = self._seen[site, call]
        self._seen[site, call] += 1
        return {"site": f"{site}#{index}" if index else site, "call": call}

    def _samples(self, shape: Sequence[Dim]) -> Dim:
        """How many sequences lie one after the other in a tensor: B where its first dim has the batch, 1 without."""
        found = sequences_in(shape)
        if found is None:
            raise CaptureError(
                f"random numbers for a tensor of shape {tuple(shape)}, whose first dim is not the batch",
                str(self._origin()),
                "draw them before the tensor is transposed",
            )
        return found
