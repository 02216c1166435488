"""Whether a request can get the same bits whatever else is served: looked at before a package is served that way.

Each entry runs once on one token or one row that belongs to no request, in fixed shapes (`runtime/invariant.py`), where
an op of which it is not known is refused. All that is refused is said at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from mgraph.errors import OptionError, PackageError
from mgraph.runtime.mesh import Mesh
from mgraph.runtime.serving.choices import Sampler
from mgraph.runtime.serving.step import Sampling


def check_place(manifest: Mapping[str, Any], device: torch.device, mesh: Mesh) -> None:
    """Raise OptionError for several ranks, and for a package whose kernels for a GPU were not made for it."""
    if mesh.world_size > 1:
        problem = "batch invariance is for one rank: the order of sums of several ranks follows their size"
        raise OptionError(problem, hint="a package without tp")
    if device.type != "cpu" and not manifest.get("batch_invariant"):
        problem = "the package's kernels for a GPU divide work by the size of a step"
        raise OptionError(problem, hint="compile it with --batch-invariant, or serve it with --device cpu")


def check_entries(runs: Mapping[str, Callable[[], Any]]) -> None:
    """Run each entry; raise one PackageError that tells of each the first op that is refused, and where it stands."""
    refused = []
    for entry, run in runs.items():
        try:
            run()
        except PackageError as error:
            refused.append(f"{entry}: {error.message}" + (f" ({error.where})" if error.where else ""))
    if refused:
        problem = f"batch invariance cannot be kept; {'; '.join(refused)}"
        raise PackageError(problem, hint="serve this package without --batch-invariant")


def rows_of_each_kind(vocab_size: int) -> dict[str, Sampling]:
    """One row for each entry that samples, by its name; the last is asked for the order of all tokens, too."""
    one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
    numbers = np.zeros(1, np.int64)
    greedy = Sampling(
        zero, np.zeros(1, np.int32), one, zero, numbers, numbers, numbers - 1, one, zero, zero, None, None, None, 0
    )
    drawn = replace(greedy, temperature=one)
    cut = replace(drawn, top_k=np.ones(1, np.int32))
    asked = replace(cut, alternatives=1)
    bias = np.zeros((1, vocab_size), np.float32)
    changed = replace(drawn, prompts=(numbers,), outputs=(numbers,), bias=bias, alternatives=vocab_size)
    kinds = [sampler for sampler in Sampler if sampler is not Sampler.NONE]
    return dict(zip(kinds, (greedy, drawn, cut, asked, changed), strict=True))
