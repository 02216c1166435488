"""Products of matrices by the fastest of cuBLASLt's kernels, timed where a step first makes them.

While a `TunedProducts` is entered, each product of two matrices in bf16 or f16 on a GPU (`aten.mm`) goes through it,
and sums of a total and a product (`cublas_lt.sum_of`) ask it which kernel to take. The first of a shape is timed on the
tensors that it is handed. A large product draws as much power as a GPU may have, which then lowers its clock, so the
kernel that is fastest alone need not be the one that is fastest in a step: every candidate is timed once, and the best
of them, and what would run otherwise, over and over, each for long enough that clocks have settled. What wins runs all
others of this shape, in CUDA graphs, too. A candidate must give what torch gives, within roundings. While a graph is
captured nothing is timed: what is not known then runs as in torch.

Times differ from run to run, and so may choices. So they are kept beside the package (`kept_products.py`): a later run
on such a machine takes them, after one look at what each gives, and times nothing.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mgraph.runtime import cublas_lt
from mgraph.runtime.cublas_lt import Product, Shape
from mgraph.runtime.kept_products import KeptProducts

_aten: Any = torch.ops.aten
TIMES, KEPT = 2, 8
"""Products over which every candidate is timed at first, and how many candidates are timed longer."""
SPAN = 0.06
"""For how many seconds those are timed, in each of three rounds, after half as many in which clocks settle."""
LEAST_GAIN = 0.99
"""A candidate is taken if it needs less than this part of torch's time."""
LEAST_WORK = 2**33
"""Multiplications below which a product is left to torch: launches then cost as much."""
CLOSE, MOST = 5e-3, 2e-2
"""Largest differences from what torch gives, in the norm, of which roundings of bf16 are less than half, and of an
element, of the largest."""

Run = Callable[[Tensor, Tensor, Tensor], bool]
"""Writes left @ right over out; False where the kernel refuses it."""
TUNED = ("microbatch", "last", "finish")
"""The entries of a package that train: others are called with sizes that do not come again."""
Timer = Callable[[Callable[[], Any], int], float]
"""Seconds of a call, over so many."""


class TunedProducts(TorchDispatchMode):
    """Runs products by what is fastest; `chosen` says by which candidate, None where torch's own choice is, and `sums`
    by which one a product is added to a residual. Choices that are `kept` are taken."""

    def __init__(self, kept: KeptProducts | None = None, timer: Timer | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept = kept
        self._runs: dict[Shape, Run | None] = {}
        self._timer = timer or _seconds
        self.chosen: dict[Shape, int | None] = {}
        self.sums: dict[Shape, int] = {}

    def __enter__(self) -> Self:
        self._before, cublas_lt.kernel_of_sum = cublas_lt.kernel_of_sum, self.kernel_of_sum
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        cublas_lt.kernel_of_sum = self._before
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (_aten.mm.default, _aten.mm.out):
            return func(*args, **(kwargs or {}))
        left, right = args
        out = (kwargs or {}).get("out")
        run = self._run_of(left, right, out)
        if run is None:
            return func(*args, **(kwargs or {}))
        made = left.new_empty(left.shape[0], right.shape[1]) if out is None else out
        return made if run(left, right, made) else func(*args, **(kwargs or {}))

    def _run_of(self, left: Tensor, right: Tensor, out: Tensor | None) -> Run | None:
        """What runs a product, if not torch."""
        work = left.shape[0] * left.shape[1] * right.shape[1]
        known = out is None or (out.is_contiguous() and out.dtype is left.dtype and cublas_lt.is_aligned(out))
        fits = known and work >= LEAST_WORK and left.is_cuda and left.device.index == torch.cuda.current_device()
        shape = Shape.of(left, right) if fits else None
        if shape is None:
            return None
        if shape not in self._runs:
            if torch.cuda.is_current_stream_capturing() or not _tells(left, right):
                return None
            self._runs[shape] = self.tune(shape, Product(shape).widened(), left, right)
        return self._runs[shape]

    def tune(self, shape: Shape, product: Product, left: Tensor, right: Tensor) -> Run | None:
        """The fastest kernel of a product on these operands, if it is faster than what torch takes."""
        want = left.new_empty(shape.rows, shape.columns)
        index = self._choice(shape, product, lambda: torch.mm(left, right, out=want), want, left, right)
        self.chosen[shape] = index
        return None if index is None else lambda a, b, to: product.run(index, a, b, to)

    def kernel_of_sum(self, shape: Shape, product: Product, total: Tensor, left: Tensor, right: Tensor) -> int:
        """The fastest kernel that adds a product of this shape to a total, timed at the first one."""
        work = shape.rows * shape.columns * shape.depth
        if shape not in self.sums:
            if work < LEAST_WORK or torch.cuda.is_current_stream_capturing() or not _tells(left, right):
                return 0
            want = torch.empty_like(total)
            first = functools.partial(product.run, 0, left, right, want, total)
            self.sums[shape] = self._choice(shape, product.widened(), first, want, left, right, total) or 0
        return self.sums[shape]

    def _choice(
        self,
        shape: Shape,
        product: Product,
        usual: Callable[[], Any],
        want: Tensor,
        left: Tensor,
        right: Tensor,
        added: Tensor | None = None,
    ) -> int | None:
        """The kernel that is kept or found to be faster than the usual run, which writes over `want`; None where that
        is as fast."""
        out = torch.empty_like(want)
        usual()
        bounds = CLOSE * float(_norm(want)), MOST * float(want.abs().max())

        def agrees(index: int) -> bool:
            ran = product.run(index, left, right, out.fill_(math.nan), added)
            return ran and float(_norm(out - want)) <= bounds[0] and float((out - want).abs().max()) <= bounds[1]

        summed = added is not None
        known, index = self.kept.of(shape, summed) if self.kept else (False, None)
        if known and (index is None or (index < product.count and agrees(index))):
            return index
        runs = [functools.partial(product.run, i, left, right, out, added) for i in range(product.count)]
        index = self._fastest(usual, runs, agrees)
        if self.kept:
            self.kept.keep(shape, summed, index)
        return index

    def _fastest(
        self, usual: Callable[[], Any], every: Sequence[Callable[[], bool]], agrees: Callable[[int], bool]
    ) -> int | None:
        """The number of the run that agrees and is faster than the usual one; None where that is as fast."""
        quick = {index: self._timer(run, TIMES) for index, run in enumerate(every) if run()}
        kept: list[int] = list(itertools.islice(filter(agrees, sorted(quick, key=quick.__getitem__)), KEPT))
        calls = {index: _calls(SPAN, quick[index]) for index in kept}
        taken: dict[int, list[float]] = {index: [] for index in kept}
        usually, torchs = _calls(SPAN, self._timer(usual, TIMES)), []
        for left_over in (KEPT // 2, KEPT // 4, 1):
            torchs.append(self._settled(usual, usually))
            for index in kept:
                taken[index].append(self._settled(every[index], calls[index]))
            kept = sorted(kept, key=lambda index: statistics.median(taken[index]))[:left_over]
        return next((i for i in kept if statistics.median(taken[i]) < LEAST_GAIN * statistics.median(torchs)), None)

    def _settled(self, run: Callable[[], Any], calls: int) -> float:
        """Seconds of a call once clocks have settled."""
        self._timer(run, calls // 2)
        return self._timer(run, calls)


def tuned_entry(entry: Callable[..., tuple[Tensor, ...]], products: TunedProducts) -> Callable[..., tuple[Tensor, ...]]:
    """An entry of a package whose products are tuned."""

    def run(*arguments: Any) -> tuple[Tensor, ...]:
        with products:
            made = entry(*arguments)
        if products.kept:
            products.kept.write()
        return made

    return run


def _norm(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.float32)
    return norm


def _tells(left: Tensor, right: Tensor) -> bool:
    """Whether a product shows what a kernel does: of nothing but zeros (as some weights begin) any would be right."""
    return bool(left.any()) and bool(right.any())


def _calls(seconds: float, each: float) -> int:
    """Calls that take so many seconds in all."""
    return max(2, math.ceil(seconds / max(each, 1e-6)))


def _seconds(run: Callable[[], Any], calls: int) -> float:
    """Seconds of a call on the GPU."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / calls
