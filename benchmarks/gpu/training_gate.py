"""Whether a package trains as eager bf16 does, within that one's own rounding noise.

Losses of steps that follow one another wander apart by chance once some loss jumps, whatever the rounding. So there are
several streams of batches, each trained from the same weights, and what is compared is the median over all of their
steps of |loss / loss in f32 - 1|; besides, no loss may be far off. Gradients wander nowhere: those of one batch, of the
first sequences of all streams, are compared parameter by parameter, by the norm of the difference from those in f32,
relative to these. What counts is how many times as far as eager bf16's they are where that is worst.
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

STREAMS, STEPS, LENGTH = 8, 8, 1024
"""Streams, steps of each, and tokens of a batch: f32 has no fused attention for grouped heads, and whole batches would
not fit."""
MOST_NOISE = 2.0
"""How many times as far from f32 as those of eager bf16 losses may be, and the gradient of any parameter."""
FARTHEST = 0.2
"""No loss may differ from that in f32 by more; those of eager bf16 differ by up to 0.04 once they have wandered."""

Weights = Mapping[str, Tensor]
Gradients = dict[str, Tensor]
Losses = list[list[float]]
"""Of each step of each stream."""


class Judged(Protocol):
    """What is judged."""

    def __call__(self, batch: Batch) -> Tensor:
        """Train a step; the loss."""

    def gradients(self, batch: Batch) -> Gradients:
        """The gradients of the mean loss, with no update."""

    def restart(self, weights: Weights) -> None:
        """Begin again, from these weights."""


@dataclass(frozen=True)
class Reference:
    """What eager gives from the same weights: losses and gradients in f32, and how far those in bf16 are from them."""

    streams: list[list[Batch]]
    losses: Losses
    gradients: Gradients
    noise: float
    gradient_noise: dict[str, float]

    def judge(self, trained: Judged, weights: Weights) -> dict[str, Any]:
        """How far losses are from f32, beside eager bf16's; by how many times that one's distance gradients are, where
        that is worst; `is_near`: whether near enough."""
        first = together(self.streams)
        weights = {name: tensor.to(first[0].device) for name, tensor in weights.items()}
        trained.restart(weights)
        worst, where = self.farthest(trained.gradients(first), self.gradients)
        losses: Losses = []
        for stream in self.streams:
            trained.restart(weights)
            losses.append([float(trained(batch)) for batch in stream])
        off = apart(losses, self.losses)
        middle, most = statistics.median(off), max(off)
        return {
            "distance_from_f32": middle,
            "distance_of_eager": self.noise,
            "gradients_times_eager": worst,
            "farthest_gradient": where,
            "is_near": middle <= MOST_NOISE * self.noise and most <= FARTHEST and worst <= MOST_NOISE,
        }

    def farthest(self, found: Gradients, wanted: Gradients) -> tuple[float, str]:
        """By how many times the distance of eager bf16 from f32 a gradient is off, at most, and whose it is. One that
        eager has exactly right counts by the median of all."""
        usual = statistics.median(self.gradient_noise.values())
        times = {n: off / (self.gradient_noise[n] or usual) for n, off in distances(found, wanted).items()}
        return max((value, name) for name, value in times.items())


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
    noise = statistics.median(apart(low[0], exact[0]))
    return Reference(streams, exact[0], exact[1], noise, distances(low[1], exact[1]))


def together(streams: list[list[Batch]]) -> Batch:
    """The first batches of all streams as one."""
    tokens, labels = zip(*(stream[0] for stream in streams), strict=True)
    return torch.cat(tokens), torch.cat(labels)


def _trained(make: Callable[[], peers.Trained], streams: list[list[Batch]]) -> tuple[Losses, Gradients]:
    """Losses, and the gradients of the first batches, on the CPU."""
    losses: Losses = []
    gradients: Gradients = {}
    for stream in streams:
        trained = make()
        if not gradients:
            gradients = {n: grad.float().cpu() for n, grad in trained.gradients(together(streams)).items()}
        losses.append([float(trained(batch)) for batch in stream])
        del trained
        if stream[0][0].is_cuda:
            gc.collect()
            torch.cuda.empty_cache()
    return losses, gradients


def apart(found: Losses, exact: Losses) -> list[float]:
    """The relative differences of all losses; infinite where one is no number."""
    pairs = [pair for streams in zip(found, exact, strict=True) for pair in zip(*streams, strict=True)]
    return [abs(a / b - 1) if math.isfinite(a) else math.inf for a, b in pairs]


def distances(found: Gradients, wanted: Gradients) -> dict[str, float]:
    """The norm of the difference of each gradient, relative to that of the wanted one, which may be elsewhere; infinite
    where it is no number."""
    assert found.keys() == wanted.keys(), f"gradients of {sorted(found.keys() ^ wanted.keys())} are missing on one side"
    made = {}
    for name, grad in found.items():
        exact = wanted[name].to(grad.device).float()
        off = float((grad.float() - exact).norm() / exact.norm().clamp(min=1e-30))
        made[name] = off if math.isfinite(off) else math.inf
    return made
