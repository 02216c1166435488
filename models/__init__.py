"""The model zoo: plain PyTorch definitions. `get("moe", "tiny")` builds one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import nn

if __name__ != "mgraph.models":
    raise ImportError(f"models/ is imported as mgraph.models, not as {__name__}")

from .config import SIZES, ModelConfig
from .dense import Dense
from .moe import MixtureOfExperts

FAMILIES: dict[str, Callable[[ModelConfig], nn.Module]] = {"dense": Dense, "moe": MixtureOfExperts}

__all__ = ["FAMILIES", "SIZES", "Dense", "MixtureOfExperts", "ModelConfig", "get"]


def get(name: str, size: str = "tiny", **changes: Any) -> nn.Module:
    """Build the model `name` (a key of `FAMILIES`) at `size` (a key of `SIZES[name]`), on the default device and dtype.

    `changes` replace fields of the size's `ModelConfig`, such as `vocab_size=32768`. Raises KeyError with the known
    names for an unknown name or size.
    """
    if name not in FAMILIES:
        raise KeyError(f"no model {name!r}; known: {', '.join(sorted(FAMILIES))}")
    if size not in SIZES[name]:
        raise KeyError(f"model {name!r} has no size {size!r}; known: {', '.join(SIZES[name])}")
    return FAMILIES[name](dataclasses.replace(SIZES[name][size], **changes))
