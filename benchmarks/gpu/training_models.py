"""The models of the training benchmarks: a dense decoder of 0.9 B parameters (E1a), eight layers of Llama 3 8B's shape
(E1b), six layers of experts (E2a), four of Qwen3-30B-A3B's shape (E2b), small ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mgraph import models

Batch = tuple[Tensor, Tensor]
"""Tokens and labels, i64 [B, S]."""

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

    def batches(self, data_rank: int, count: int, device: torch.device) -> list[Batch]:
        """The batches of a data rank: random walks over the vocabulary, so that there is something to learn."""
        generator = torch.Generator().manual_seed(data_rank)
        made = []
        for _ in range(count):
            steps = torch.randint(0, 4, (self.batch, self.length + 1), generator=generator)
            rows = steps.cumsum(1) % self.changes.get("vocab_size", 256)
            made.append((rows[:, :-1].contiguous().to(device), rows[:, 1:].contiguous().to(device)))
        return made

    def flops(self) -> float:
        """Floating-point operations of a training step on one batch: 6 (N - embedding) + 6 L H S per token, active
        parameters only, causal attention counted half."""
        model = self.make_empty()
        total = 0.0
        for name, parameter in model.named_parameters():
            share = 1.0
            if parameter.dim() == 3:  # of all experts
                share = self.changes["top_k"] / self.changes["num_experts"]
            total += share * parameter.numel() * (not name.startswith("embed"))
        width = self.changes["num_heads"] * self.changes["head_width"]
        return float(self.batch * self.length * 6 * (total + self.changes["num_layers"] * width * self.length))

    def make_empty(self) -> models.Decoder:
        """The model without values."""
        with torch.device("meta"):
            return self.make()


SHAPES = {
    "dense": Shape("dense", {**_WIDE, "num_layers": 16, "d_ff": 5632}, 4, 4096),
    "moe": Shape("moe", {**_WIDE, "num_layers": 6, "d_ff": 1024, "num_experts": 64, "top_k": 8}, 4, 4096),
    "llama8": Shape(
        "dense",
        {
            "vocab_size": 128256,
            "d_model": 4096,
            "num_heads": 32,
            "num_kv_heads": 8,
            "head_width": 128,
            "num_layers": 8,
            "d_ff": 14336,
        },
        1,
        8192,
    ),
    "qwen30": Shape(
        "qwen3",
        {
            "vocab_size": 151936,
            "d_model": 2048,
            "num_heads": 32,
            "num_kv_heads": 4,
            "head_width": 128,
            "num_layers": 4,
            "d_ff": 768,
            "num_experts": 128,
            "top_k": 8,
        },
        4,
        4096,
    ),
    "small-dense": Shape("dense", {"num_layers": 3}, 2, 32),
    "small-moe": Shape("moe", {"num_layers": 3}, 2, 32),
}


def dense() -> models.Decoder:
    """As `mgraph compile` takes it."""
    return SHAPES["dense"].make()


def llama8() -> models.Decoder:
    """As `mgraph compile` takes it."""
    return SHAPES["llama8"].make()


def moe() -> models.Decoder:
    """As `mgraph compile` takes it."""
    return SHAPES["moe"].make()


def qwen30() -> models.Decoder:
    """As `mgraph compile` takes it."""
    return SHAPES["qwen30"].make()


def small_dense() -> models.Decoder:
    """For trying the benchmark without GPUs."""
    return SHAPES["small-dense"].make()


def small_moe() -> models.Decoder:
    """For trying the benchmark without GPUs."""
    return SHAPES["small-moe"].make()
