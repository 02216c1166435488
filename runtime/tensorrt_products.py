"""Products of rows with weights, and gated units of two, by TensorRT through the library torch-tensorrt; an experiment
that has to be asked for.

An engine is built at the first call of each shape, by torch.compile with the library's backend, which takes seconds.
Its calls are tested against a stub; the library's own libraries could not be had, so it has never run.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_said: set[str] = set()


def fits(x: Tensor) -> bool:
    """Whether the library runs products of these rows: there are some, in bf16, f16 or f32 on a GPU, and no gradient is
    wanted of them. Why not is said once."""
    if x.requires_grad and torch.is_grad_enabled():
        reason = "it has no gradients"
    elif x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        reason = f"rows are {x.dtype}"
    elif not x.numel():
        reason = "there are no rows"
    elif not _is_there(x.device):
        reason = f"it is not installed, or not for {x.device.type}"
    else:
        return True
    if reason not in _said:
        _said.add(reason)
        warnings.warn(f"products by tensorrt do not run here: {reason}; torch does", RuntimeWarning, stacklevel=4)
    return False


def run(function: Callable[..., Tensor], given: tuple[Tensor, ...], **options: Any) -> Tensor:
    """`function(*given, **options)`, of plain torch operations, by an engine for these shapes."""
    engine: Callable[..., Tensor] = _compiled(function)
    return engine(*given, **options)


def _compiled(function: Callable[..., Tensor]) -> Any:
    """The function as the library's backend compiles it, one engine a shape; each function has one."""
    if function not in _engines:
        _library()  # whose import adds the backend
        _engines[function] = torch.compile(function, backend="torch_tensorrt", dynamic=False, fullgraph=True)
    return _engines[function]


_engines: dict[Callable[..., Tensor], Any] = {}


def _is_there(device: torch.device) -> bool:
    found = False
    with contextlib.suppress(ImportError, ValueError):  # of a name that stands half imported
        found = importlib.util.find_spec("torch_tensorrt") is not None
    return device.type == "cuda" and found


def _library() -> Any:
    return importlib.import_module("torch_tensorrt")
