"""Structure: calls, accumulation into state, and sums of cotangents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mgraph.ir.opdef import REQUIRED, define_op
from mgraph.ir.types import TensorType


def _call(*operands: Any, callee: str) -> Any:
    """Call a function of the module: operands are its params, then its slots; `static.*` attrs are its statics."""
    raise AssertionError(f"a call of {callee} is run by the interpreter, not as an op")


def _infer_call(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    raise ValueError(f"the result types of a call come from its callee {attrs['callee']!r}: give them explicitly")


call = define_op("call", _call, attrs={"callee": REQUIRED}, infer=_infer_call, free_attrs=True)


def _accumulate(total: Any, part: Any, fresh: bool = False, late: bool = False) -> Any:
    """`total + part` in the dtype of `total`: how gradients of several microbatches add up. A `fresh` total counts as
    zeros, whatever it holds. A `late` sum may be made at any time before the entry ends."""
    return part.to(total.dtype, copy=True) if fresh else total + part.to(total.dtype)


def _same_as_first(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    if len(types) > 1 and types[0].shape != types[1].shape:
        raise ValueError(f"shapes differ: {types[0]} and {types[1]}")
    return (types[0],)


accumulate = define_op("accumulate", _accumulate, attrs={"fresh": False, "late": False}, infer=_same_as_first)


def _accumulate_each(*tensors: Any, fresh: bool = False) -> Any:
    """`total + part` in the dtype of `total`, for as many totals, then as many parts: one node for a bucket. `fresh`
    totals all count as zeros."""
    count = len(tensors) // 2
    return tuple(_accumulate(total, part, fresh) for total, part in zip(tensors[:count], tensors[count:], strict=True))


def _infer_accumulate_each(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    count, odd = divmod(len(types), 2)
    if odd:
        raise ValueError(f"accumulate_each takes as many parts as totals, and was given {len(types)} tensors")
    return tuple(_same_as_first(pair, attrs)[0] for pair in zip(types[:count], types[count:], strict=True))


accumulate_each = define_op("accumulate_each", _accumulate_each, attrs={"fresh": False}, infer=_infer_accumulate_each)


def _zero(*tensors: Any) -> Any:
    """Zeros of the same types: the reset of accumulators. One node takes any number of them."""
    import torch

    return tuple(torch.zeros_like(t) for t in tensors)


def _same_as_each(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    return tuple(types)


zero = define_op("zero", _zero, infer=_same_as_each)
