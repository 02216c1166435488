"""The models of the benchmark on two GPUs: a dense decoder of 0.9 B parameters, six layers of experts, small ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mgraph import models

_WIDE = {"vocab_size": 32768, "d_model": 2048, "num_heads": 16, "num_kv_heads": 8, "head_width": 128}


@dataclass(frozen=True)
class Shape:
    """A zoo family with changes, and the batch that a rank trains on."""

    family: str
    changes: dict[str, Any]
    batch: int
    length: int

    def make(self) -> models.Decoder:
        """The model, initialised."""
        return models.get(self.family, "tiny", **self.changes)


SHAPES = {
    "dense": Shape("dense", {**_WIDE, "num_layers": 16, "d_ff": 5632}, 4, 4096),
    "moe": Shape("moe", {**_WIDE, "num_layers": 6, "d_ff": 1024, "num_experts": 64, "top_k": 8}, 4, 4096),
    "small-dense": Shape("dense", {"num_layers": 3}, 2, 32),
    "small-moe": Shape("moe", {"num_layers": 3}, 2, 32),
}


def dense() -> models.Decoder:
    """As `mgraph compile` takes it."""
    return SHAPES["dense"].make()


def moe() -> models.Decoder:
    """As `mgraph compile` takes it."""
    return SHAPES["moe"].make()


def small_dense() -> models.Decoder:
    """For trying the benchmark without GPUs."""
    return SHAPES["small-dense"].make()


def small_moe() -> models.Decoder:
    """For trying the benchmark without GPUs."""
    return SHAPES["small-moe"].make()
