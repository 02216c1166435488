"""Copies between the memory of the device and pinned memory of the host, in two halves: the start, then `wait`.

To a graph they mean nothing: each gives what it was handed. What `to_host_start` gives lies on the host, and so does
state that is marked `host`; both are read by `to_device_start` only, and such state is written by `store_start` only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mgraph.ir.opdef import define_op
from mgraph.ir.types import PendingType, TensorType, Type


def _to_host(*tensors: Any) -> Any:
    """Begin to copy tensors to the host."""
    return tensors


def _to_device(*tensors: Any) -> Any:
    """Begin to copy tensors of the host to the device."""
    return tensors


def _infer_copy(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[Type, ...]:
    return tuple(map(PendingType, types))


to_host_start = define_op("to_host_start", _to_host, infer=_infer_copy)
to_device_start = define_op("to_device_start", _to_device, infer=_infer_copy)


def _store(*tensors: Any) -> Any:
    """Begin to copy tensors of the device over state of the host: operands are n states, then n tensors; `wait` gives
    the new values of the states."""
    return tensors[len(tensors) // 2 :]


def _infer_store(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[Type, ...]:
    states, values = types[: len(types) // 2], types[len(types) // 2 :]
    if list(states) != list(values):
        raise ValueError("store_start takes n states, then n tensors of the same types")
    return tuple(map(PendingType, states))


store_start = define_op("store_start", _store, infer=_infer_store)
