"""What runs a step package: loading, process groups, state, data, the training loop. Imports nothing of the compiler.

A training run passes through the files in this order, one file per stage:

    start       what takes long begins in threads, before torch is imported
    options     what the person typed
    package     manifest.json and step.py become entry functions
    mesh        processes become named axes with their groups, and agree that they run the same code
    data        text becomes a resumable stream of (tokens, labels)
    state       initialisers become tensors
    checkpoint  the newest whole checkpoint is found, and each rank reads its part
    train       the loop: microbatches, finish, evaluation, signals
    schedule    the learning rate of a step
    log, plot   what the loop reports: a progress bar, JSON lines, TensorBoard events, a picture
    saving      state is written while the loop goes on, whole or not at all
    sample      the trained model writes text

`serving` has what serves a model; `LLM` and `SamplingParams` are its names for programs. `v1` is the one module that an
emitted step.py imports. Importing this package imports nothing heavy.
"""

from __future__ import annotations

from typing import Any

if __name__ != "mgraph.runtime":
    raise ImportError(f"runtime/ is imported as mgraph.runtime, not as {__name__}")

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """The public names of `serving`, imported on first use."""
    if name not in __all__:
        raise AttributeError(f"module 'mgraph.runtime' has no attribute {name!r}")
    import mgraph

    return getattr(mgraph, name)
