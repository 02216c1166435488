"""Products of matrices by the fastest of the kernels that cuBLASLt proposes, timed where a step first makes them.

While a `TunedProducts` is entered, each product of two matrices in bf16 or f16 on a GPU (`aten.mm`) goes through it.
The first of a shape is timed on the tensors that it is handed: every candidate, and torch's own choice, in turns, so
that all run equally warm. What wins runs all others of this shape, in CUDA graphs, too. A candidate must give what
torch gives, within roundings. While a graph is captured nothing is timed: what is not known then runs as in torch.

Times differ from run to run, and so may choices: two runs with tuned products agree within roundings, not bit by bit.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mgraph.runtime.cublas_lt import Product, Shape

_aten: Any = torch.ops.aten
ROUNDS, TIMES = 5, 3
"""How often each candidate is timed, and over how many products."""
LEAST_GAIN = 0.99
"""A candidate is taken if it needs less than this part of torch's time."""
LEAST_WORK = 2**33
"""Multiplications below which a product is left to torch: launches then cost as much."""
CLOSE = 2e-2
"""Largest difference from what torch gives, relative to the largest element."""

Run = Callable[[Tensor, Tensor, Tensor], Any]
"""Writes left @ right over out."""


class TunedProducts(TorchDispatchMode):
    """Runs products by what is fastest; `chosen` says by which candidate, None where torch's own choice is."""

    def __init__(self, timer: Callable[[Callable[[], Any]], float] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._runs: dict[Shape, Run | None] = {}
        self._timer = timer or _seconds
        self.chosen: dict[Shape, int | None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (_aten.mm.default, _aten.mm.out):
            return func(*args, **(kwargs or {}))
        left, right = args
        out = (kwargs or {}).get("out")
        run = self._run_of(left, right, out)
        if run is None:
            return func(*args, **(kwargs or {}))
        made = left.new_empty(left.shape[0], right.shape[1]) if out is None else out
        run(left, right, made)
        return made

    def _run_of(self, left: Tensor, right: Tensor, out: Tensor | None) -> Run | None:
        """What runs a product, if not torch."""
        work = left.shape[0] * left.shape[1] * right.shape[1]
        fits = (
            left.is_cuda and work >= LEAST_WORK and (out is None or (out.is_contiguous() and out.dtype is left.dtype))
        )
        shape = Shape.of(left, right) if fits else None
        if shape is None:
            return None
        if shape not in self._runs:
            if torch.cuda.is_current_stream_capturing():
                return None
            self._runs[shape] = self.tune(shape, Product(shape), left, right)
        return self._runs[shape]

    def tune(self, shape: Shape, product: Product, left: Tensor, right: Tensor) -> Run | None:
        """The fastest kernel of a product on these operands, if it is faster than what torch takes."""
        out, want = (left.new_empty(shape.rows, shape.columns) for _ in range(2))
        torch.mm(left, right, out=want)
        bound = CLOSE * float(want.abs().max())

        def agrees(index: int) -> bool:
            return product.run(index, left, right, out) and float((out - want).abs().max()) <= bound

        candidates = [index for index in range(product.count) if agrees(index)]
        times: dict[int | None, list[float]] = {index: [] for index in (None, *candidates)}
        for _ in range(ROUNDS):
            for index, taken in times.items():
                if index is None:
                    taken.append(self._timer(lambda: torch.mm(left, right, out=want)))
                else:
                    taken.append(self._timer(lambda index=index: product.run(index, left, right, out)))  # type: ignore[misc]
        usual = statistics.median(times[None])
        best = min(times, key=lambda index: statistics.median(times[index]))
        if best is None or statistics.median(times[best]) >= LEAST_GAIN * usual:
            self.chosen[shape] = None
            return None
        self.chosen[shape] = index = best
        return lambda a, b, to: product.run(index, a, b, to)


def tuned_entry(entry: Callable[..., tuple[Tensor, ...]], products: TunedProducts) -> Callable[..., tuple[Tensor, ...]]:
    """An entry of a package whose products are tuned."""

    def run(*arguments: Any) -> tuple[Tensor, ...]:
        with products:
            return entry(*arguments)

    return run


def _seconds(run: Callable[[], Any]) -> float:
    """Seconds of a call on the GPU."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(TIMES):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / TIMES
