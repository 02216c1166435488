"""What a benchmark of one kernel is: the kernel, its inputs, what is right, and who else can do it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mgraph.codegen.triton import KernelSpec


@dataclass(frozen=True)
class Halves:
    """Work of inputs with a gradient: a first half of as many of them as it takes, which gives its result and what the
    second one needs beside all inputs, and that second one, which may empty what it is handed."""

    taken: int
    forward: Callable[..., tuple[Tensor, list[Any]]]
    backward: Callable[..., tuple[Any, ...]]

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """Both halves."""
        result, kept = self.forward(*inputs[: self.taken])
        return self.backward(result, kept, *inputs)


@dataclass(frozen=True)
class Case:
    """One measurement.

    id        as in the list of targets (K1, ...), with what tells cases of one target apart
    workload  shapes and dtypes in words
    spec      the kernel site
    inputs    makes the inputs of the site on a device: tensors, or lists of them; the site may write into some
    reference the results of the site, in its order, from the inputs in float64 (integers stay as they are)
    narrow    the reference takes the inputs as they are, as float64 has no room for them, and widens them part by part
    peers     plain torch functions of the same inputs, by name; those named `compile...` are to be compiled first
    launched  peers that cannot be in a CUDA graph, as they wait for the GPU: they are timed launch by launch
    written   inputs, by their places, that the site writes and does not give; the reference and peers write them too
    bytes     the least that must be read and written
    bound     the largest error of a result in the Frobenius norm, relative to the result
    flops     floating-point operations of the work, where they are what takes the time
    more      further sites, where the work is of several
    joined    makes of the package's kernels what runs them; the site itself where there is but one
    """

    id: str
    workload: str
    spec: KernelSpec
    inputs: Callable[[torch.device], tuple[Any, ...]]
    reference: Callable[..., tuple[Any, ...]]
    peers: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    launched: tuple[str, ...] = ()
    narrow: bool = False
    written: tuple[int, ...] = ()
    bytes: int = 0
    bound: float = 1e-2
    flops: float = 0.0
    more: tuple[KernelSpec, ...] = ()
    joined: Callable[[Any], Callable[..., Any]] | None = None
