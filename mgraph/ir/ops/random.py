"""Random numbers that are the same on every mesh, under recompute, in graphs and after resume."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mgraph.ir.dims import as_dim
from mgraph.ir.opdef import REQUIRED, define_op
from mgraph.ir.torch_bridge import to_torch_dtype
from mgraph.ir.types import DType, TensorType


def _random(seed: Any, step: Any, microbatch: Any, *, shape: Sequence[int], dtype: DType, call: int, site: str) -> Any:
    """Uniform numbers in [0, 1), by Philox (Salmon et al. 2011), keyed by (seed, step, microbatch, call, site) and
    counted by global element index.

    Operands are i64[]; `site` names the place in the model, `call` the layer.
    """
    from mgraph import philox

    key = philox.key_from(int(seed), int(step), int(microbatch), call, site)
    return philox.uniform(list(shape), key, dtype=to_torch_dtype(dtype), device=seed.device)


def _infer_random(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    return (TensorType(attrs["dtype"], tuple(map(as_dim, attrs["shape"]))),)


random = define_op(
    "random",
    _random,
    attrs={"shape": REQUIRED, "dtype": DType.F32, "call": 0, "site": REQUIRED},
    infer=_infer_random,
    random=True,
)
