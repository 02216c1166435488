"""Dropout and noise whose numbers follow from where an element is, not from a generator (see `mgraph.philox`).

Three scalars of the state say where: the run's seed, the number of finished steps, and which sequence of the step is
the first of the microbatch. `place` sets the last two; a package without random numbers has none of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mgraph import philox

SEED, STEP, SAMPLE = "rng.seed", "rng.step", "rng.sample"


def seed(state: dict[str, Tensor], number: int) -> None:
    """Let the random ops draw other numbers than those of the run's seed."""
    if SEED in state:
        state[SEED].fill_(number)


def place(state: dict[str, Tensor], step: int, sample: int) -> None:
    """Tell the random ops of the next microbatch where it stands in the run."""
    for name, value in ((STEP, step), (SAMPLE, sample)):
        if name in state:
            state[name].fill_(value)


def dropout(
    x: Tensor, seed: Tensor, step: Tensor, sample: Tensor, *, p: float, site: str, call: int = 0, samples: int
) -> Tensor:
    """`x * keep / (1 - p)`, keep being 0 with probability p; `samples` sequences lie in x one after the other."""
    keep = philox.keep_by_sample(x.shape, samples, philox.sample_key(seed, site, call), step, sample, p)
    return (x * (1.0 / (1.0 - p) if p < 1 else 0.0)).mul_(keep)


def dropout_part(
    x: Tensor,
    seed: Tensor,
    step: Tensor,
    sample: Tensor,
    index: int,
    *,
    p: float,
    site: str,
    call: int = 0,
    samples: int,
    dim: int,
    parts: int,
) -> Tensor:
    """`dropout` where x is part `index` of `parts` equal ones along `dim` (not the first): as in the whole tensor."""
    key = philox.sample_key(seed, site, call)
    keep = philox.keep_part(x.shape, samples, key, step, sample, p, dim=dim, index=index, parts=parts)
    return (x * (1.0 / (1.0 - p) if p < 1 else 0.0)).mul_(keep)


def random(
    seed: Tensor,
    step: Tensor,
    sample: Tensor,
    *,
    shape: list[int],
    dtype: torch.dtype = torch.float32,
    site: str,
    call: int = 0,
    samples: int,
) -> Tensor:
    """Uniform numbers in [0, 1) of `shape`; `samples` sequences lie in it one after the other."""
    key = philox.sample_key(seed, site, call)
    return philox.uniform_by_sample(shape, samples, key, step, sample).to(dtype)
