"""Whether a package trains as eager bf16 does, within that one's own rounding noise.

Losses of steps that follow one another wander apart by chance once some loss jumps, whatever the rounding. So there are
several streams of batches, each trained from the same weights, and what is compared is the median over all of their
steps of |loss / loss in f32 - 1|. The gradients of one batch, all in one vector, wander nowhere: their distance from
those in f32, relative to these, is compared as well, and bound more tightly.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.gpu import peers
from benchmarks.gpu.training_models import Batch, Shape

STREAMS, STEPS, LENGTH = 4, 8, 1024
"""Streams, steps of each, and tokens of a batch: f32 has no fused attention for grouped heads, and whole batches would
not fit."""
MOST_NOISE, MOST_GRADIENT_NOISE = 1.5, 1.1
"""How many times as far from f32 as those of eager bf16 losses and gradients may be."""

Weights = Mapping[str, Tensor]


class Judged(Protocol):
    """What is judged."""

    def __call__(self, batch: Batch) -> Tensor:
        """Train a step; the loss."""

    def gradients(self, batch: Batch) -> dict[str, Tensor]:
        """The gradients of the mean loss, with no update."""

    def restart(self, weights: Weights) -> None:
        """Begin again, from these weights."""


Losses = list[list[float]]
"""Of each step of each stream."""


@dataclass(frozen=True)
class Reference:
    """What eager gives from the same weights: losses and gradients in f32, and how far those in bf16 are from them."""

    streams: list[list[Batch]]
    losses: Losses
    gradients: dict[str, Tensor]
    noise: float
    gradient_noise: float

    def judge(self, trained: Judged, weights: Weights) -> dict[str, Any]:
        """How far losses and gradients are from f32, beside eager bf16; `is_near`: whether near enough."""
        here = next(iter(self.streams[0][0])).device
        weights = {name: tensor.to(here) for name, tensor in weights.items()}
        trained.restart(weights)
        gradient = gradient_distance(trained.gradients(self.streams[0][0]), self.gradients)
        losses: Losses = []
        for stream in self.streams:
            trained.restart(weights)
            losses.append([float(trained(batch)) for batch in stream])
        off = distance(losses, self.losses)
        near = off <= MOST_NOISE * self.noise and gradient <= MOST_GRADIENT_NOISE * self.gradient_noise
        return {
            "distance_from_f32": off,
            "distance_of_eager": self.noise,
            "gradient_distance_from_f32": gradient,
            "gradient_distance_of_eager": self.gradient_noise,
            "is_near": near,
        }


def reference(shape: Shape, weights: Weights, device: torch.device) -> Reference:
    """Train eagerly in f32 and in bf16."""
    torch.backends.cuda.matmul.allow_tf32 = False
    streams = [
        [(tokens[:1, :LENGTH], labels[:1, :LENGTH]) for tokens, labels in shape.batches(100 + number, STEPS, device)]
        for number in range(STREAMS)
    ]
    here = {name: tensor.to(device) for name, tensor in weights.items()}
    exact = _trained(lambda: peers.plain(shape, here, torch.float32, device, ""), streams)
    low = _trained(lambda: peers.plain(shape, here, torch.bfloat16, device, ""), streams)
    return Reference(streams, exact[0], exact[1], distance(low[0], exact[0]), gradient_distance(low[1], exact[1]))


def _trained(make: Callable[[], peers.Trained], streams: list[list[Batch]]) -> tuple[Losses, dict[str, Tensor]]:
    """Losses, and the gradients of the first batch, on the CPU."""
    losses: Losses = []
    gradients: dict[str, Tensor] = {}
    for stream in streams:
        trained = make()
        gradients = gradients or {n: grad.float().cpu() for n, grad in trained.gradients(stream[0]).items()}
        losses.append([float(trained(batch)) for batch in stream])
        del trained
        gc.collect()
        torch.cuda.empty_cache()
    return losses, gradients


def distance(found: Losses, exact: Losses) -> float:
    """The median of the relative differences."""
    pairs = [pair for streams in zip(found, exact, strict=True) for pair in zip(*streams, strict=True)]
    return statistics.median(abs(a / b - 1) for a, b in pairs)


def gradient_distance(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """The norm of the difference of all gradients, relative to that of the exact ones, which lie anywhere."""
    assert found.keys() == exact.keys(), f"gradients of {sorted(found.keys() ^ exact.keys())} are missing on one side"
    squares = total = 0.0
    for name, grad in found.items():
        wanted = exact[name].to(grad.device)
        squares += float((grad.float() - wanted).square().sum())
        total += float(wanted.square().sum())
    return math.sqrt(squares / total)
