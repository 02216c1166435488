"""How long a GPU takes to read some bytes and do nothing else: what small kernels can come to, as a copy of gigabytes
tells nothing of a launch, of the first load's way, and of the last."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDTHS = (2048, 4096, 8192)
"""Numbers of 4 bytes that a program has on the way at once."""
PER_SM = (1, 2, 4, 8)
BELOW = 256e6
"""Of more bytes the launch is nothing."""


@triton.jit
def read(numbers_ptr, sums_ptr, count, WIDTH: tl.constexpr, STAGES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sums of what each program reads, in turns with the others: numbers i32[count], sums i32[programs]."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    total = tl.zeros([WIDTH], dtype=tl.int32)
    for begin in tl.range(program * WIDTH, count, programs * WIDTH, num_stages=STAGES):
        place = begin + tl.arange(0, WIDTH)
        total += tl.load(numbers_ptr + place, mask=place < count, other=0)
    tl.store(sums_ptr + program, tl.sum(total, 0))


def forms(sms: int) -> list[Callable[[Tensor, Tensor], Any]]:
    """Ways to read numbers i32[n], with room for sums."""
    return [
        lambda numbers, sums, width=width, programs=sms * per_sm: read[(programs,)](  # type: ignore[misc]
            numbers, sums, numbers.numel(), WIDTH=width, STAGES=3, num_warps=8 if width > 2048 else 4
        )
        for width in WIDTHS
        for per_sm in PER_SM
    ]


@functools.cache
def reading_seconds(size: int, device: torch.device) -> float:
    """The seconds of the fastest of some ways to read `size` bytes, not from the cache if they are 2 MB or more.
    Raises ValueError where one does not read all of them."""
    from benchmarks.gpu.kernels import SHORT_CALLS, seconds_of, sets_for

    sms = torch.cuda.get_device_properties(device).multi_processor_count
    copies = sets_for(size, SHORT_CALLS) + 1
    sums = torch.empty(sms * max(PER_SM), dtype=torch.int32, device=device)
    sets = [(torch.ones(size // 4, dtype=torch.int32, device=device), sums) for _ in range(copies)]
    for form in forms(sms):
        form(sets[0][0], sums.zero_())
        if int(sums.sum()) != size // 4:
            raise ValueError(f"{int(sums.sum())} numbers were read, not {size // 4}")
    return min(seconds_of(form, sets, calls=SHORT_CALLS) for form in forms(sms))
