"""The key-value cache of inference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mgraph.ir.opdef import define_op
from mgraph.ir.types import TensorType


def _kv_append(cache: Any, new: Any, start: Any) -> Any:
    """The contiguous cache [B, G, M, D] with rows `start .. start+S` replaced by `new` [B, G, S, D]; start is i64[]."""
    made = cache.clone()
    made[:, :, int(start) : int(start) + new.shape[2]] = new.to(cache.dtype)
    return made


def _infer_kv_append(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    cache, new, _ = types
    if len(cache.shape) != 4 or (*cache.shape[:2], cache.shape[3]) != (*new.shape[:2], new.shape[3]):
        raise ValueError(f"kv_append of {new} to a cache {cache}")
    return (cache,)


kv_append = define_op("kv_append", _kv_append, infer=_infer_kv_append)
