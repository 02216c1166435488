"""The learning rate of a step: a linear warm-up, then a decay to the smallest rate at the last step."""

from __future__ import annotations

import math
from collections.abc import Callable

# What is left of the way from the peak to the minimum, after a fraction x in [0, 1] of the decay.
DECAYS: dict[str, Callable[[float], float]] = {
    "cosine": lambda x: 0.5 * (1.0 + math.cos(math.pi * x)),
    "linear": lambda x: 1.0 - x,
    "constant": lambda x: 1.0,
}


def learning_rate(step: int, steps: int, peak: float, minimum: float, warmup: int, decay: str) -> float:
    """The rate of step `step` (0-based) of `steps`.

    Step s of the warm-up has `peak * (s + 1) / warmup`, so that the first step already moves. Afterwards the rate is
    `minimum + (peak - minimum) * decay(x)`, where x runs from 0 just after the warm-up to 1 at the last step.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
    return minimum + (peak - minimum) * DECAYS[decay](progress)
