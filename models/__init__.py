"""The model zoo: plain PyTorch definitions. `get("moe", "tiny")` builds one."""

from __future__ import annotations

import dataclasses
from typing import Any

if __name__ != "mgraph.models":
    raise ImportError(f"models/ is imported as mgraph.models, not as {__name__}")

from .config import ModelConfig
from .decoder import Decoder
from .sizes import SIZES

__all__ = ["SIZES", "Decoder", "ModelConfig", "get"]


def get(name: str, size: str = "tiny", **changes: Any) -> Decoder:
    """Build the model `name` (a key of `SIZES`) at `size` (a key of `SIZES[name]`), on the default device and dtype.

    `changes` replace fields of the size's `ModelConfig`, such as `vocab_size=32768`. Raises KeyError with the known
    names for an unknown name or size.
    """
    if name not in SIZES:
        raise KeyError(f"no model {name!r}; known: {', '.join(sorted(SIZES))}")
    if size not in SIZES[name]:
        raise KeyError(f"model {name!r} has no size {size!r}; known: {', '.join(SIZES[name])}")
    return Decoder(dataclasses.replace(SIZES[name][size], **changes))
