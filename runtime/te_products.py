"""Products of groups by Transformer Engine, where that library is installed; an experiment that has to be asked for.

The library takes the size of each group from the host, which so waits for the GPU at every product, and no CUDA graph
can hold one. Its calls are tested against a stub, and have never run on a GPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import warnings
from typing import Any

import torch
from torch import Tensor

_said: set[str] = set()


def fits(rows: Tensor, weight: Tensor) -> bool:
    """Whether the library runs these products; why not is said once. Rows [R, K] and weight [E, K, N], either way round
    in memory, are in bf16 or f16 on a GPU."""
    if weight.dim() != 3 or rows.stride(-1) != 1 or 1 not in weight.stride()[1:]:
        reason = f"rows {list(rows.shape)} and weight {list(weight.shape)} lie otherwise than it takes them"
    elif rows.dtype not in (torch.bfloat16, torch.float16) or rows.dtype != weight.dtype:
        reason = f"they are {rows.dtype} and {weight.dtype}"
    elif not _is_there(rows.device):
        reason = f"it is not installed, or not for {rows.device.type}"
    else:
        return True
    if reason not in _said:
        _said.add(reason)
        warnings.warn(f"products of groups by te do not run here: {reason}; torch does", RuntimeWarning, stacklevel=4)
    return False


def grouped_mm(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """`out[r] = rows[r] @ weight[e]` for the group e that r lies in, [R, N]; rows past the last end are 0."""
    ends = offsets.tolist()
    out = rows.new_zeros(rows.shape[0], weight.shape[2])
    groups = [(e, slice(a, b)) for e, (a, b) in enumerate(itertools.pairwise([0, *ends])) if a < b]
    if not groups:
        return out
    # In its words, the first letter says that the matrix is [N, K] in memory, the second that the rows are [R, K].
    layout = "NN" if weight.stride(2) == 1 else "TN"
    matrices = [(weight[e] if layout == "NN" else weight[e].t()).contiguous() for e, _ in groups]
    parts, outs = [rows[where] for _, where in groups], [out[where] for _, where in groups]
    _library().general_grouped_gemm(
        matrices,
        parts,
        outs,
        [None] * len(groups),
        out.dtype,
        layout=layout,
        m_splits=[part.shape[0] for part in parts],
    )
    return out


def _is_there(device: torch.device) -> bool:
    return device.type == "cuda" and importlib.util.find_spec("transformer_engine") is not None


def _library() -> Any:
    """Its products, as of version 2.20."""
    return importlib.import_module("transformer_engine.pytorch.cpp_extensions")
