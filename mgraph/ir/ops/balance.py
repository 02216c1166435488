"""Loads of experts, and balance without a loss: a bias on each expert's score, moved by the load (Wang 2024).

load_e  = how many of all choices of the step were e
bias_e += rate * sign(mean load - load_e)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mgraph.ir.dims import as_dim
from mgraph.ir.opdef import REQUIRED, define_op
from mgraph.ir.ops.cost import per_element, traffic
from mgraph.ir.types import DType, TensorType


def _expert_counts(indices: Any, *, num_experts: int) -> Any:
    """How often each expert was chosen: indices i64[T, K] -> i64[E]; E itself, for what was dropped, is not counted."""
    import torch

    chosen = indices.flatten()
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=indices.device)
    return counts.index_add(0, chosen, torch.ones_like(chosen))[:-1]


def _infer_counts(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    if types[0].dtype is not DType.I64:
        raise ValueError(f"expert_counts: the indices are {types[0]}, expected i64")
    return (TensorType(DType.I64, (attrs["num_experts"],)),)


def _expert_bias_update(*operands: Any, rate: float) -> Any:
    """`bias + rate * sign(mean load - load)` of n biases, then their n loads i64[E], then finite bool[].

    Where a step is not finite, the biases stay. Loads are compared as integers: E * load with their sum.
    """
    import torch

    *tensors, finite = operands
    count = len(tensors) // 2
    made = []
    for bias, load in zip(tensors[:count], tensors[count:], strict=True):
        sign = torch.sign(load.sum() - load.numel() * load)
        made.append(torch.where(finite, bias + rate * sign.to(bias.dtype), bias))
    return tuple(made)


def _infer_update(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    count = len(types) // 2
    for bias, load in zip(types[:count], types[count:-1], strict=True):
        if bias.shape != load.shape or load.dtype is not DType.I64:
            raise ValueError(f"expert_bias_update: bias {bias} and load {load} do not fit")
    return tuple(types[:count])


def _join_loads(*loads: Any, layers: Any, choices: Any) -> Any:
    """The loads of all layers, i64[E] each, one after the other; `layers` are their names, `choices` how many experts
    a token chooses in each."""
    import torch

    return torch.cat(loads)


def _infer_join(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    if len(types) != len(attrs["layers"]) or len(types) != len(attrs["choices"]):
        raise ValueError(f"join_loads: {len(types)} loads of {len(attrs['layers'])} layers")
    return (TensorType(DType.I64, (as_dim(sum(t.shape[0] for t in types)),)),)


define_op("join_loads", _join_loads, infer=_infer_join, attrs={"layers": REQUIRED, "choices": REQUIRED}, bytes=traffic)
define_op(
    "expert_counts",
    _expert_counts,
    infer=_infer_counts,
    attrs={"num_experts": REQUIRED},
    flops=per_element(1),
    bytes=traffic,
)
define_op("expert_bias_update", _expert_bias_update, infer=_infer_update, attrs={"rate": REQUIRED})
