"""Memory asked for at once: where a device has not so much, an error says what for, how much, and what is free."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from mgraph.errors import OptionError

_LINUX = Path("/proc/meminfo")
_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


@contextmanager
def room(device: torch.device, needed: int, what: str, hint: str) -> Iterator[None]:
    """Inside, `needed` bytes are asked of the device. Raises OptionError, before or then, where they cannot be had."""
    there = free_bytes(device)
    problem = f"{what}: {size_text(needed)} are needed, and {device} has {size_text(there)} free"
    if needed > there:
        raise OptionError(problem, hint=hint)
    try:
        yield
    except RuntimeError as error:  # as torch's allocators say it; that of the CPU has no class for it
        if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
            raise OptionError(problem, hint=hint) from error
        raise


def free_bytes(device: torch.device) -> int:
    """What torch can still have on a device. On the CPU that is what the system could give without swapping."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    try:
        named = dict(line.split(":", 1) for line in _LINUX.read_text("ascii").splitlines())
        return int(named["MemAvailable"].split()[0]) * 2**10
    except (OSError, KeyError, ValueError):  # another system
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def size_text(count: int) -> str:
    """Bytes in the largest unit of which there is one."""
    size, unit = next(((size, unit) for size, unit in _UNITS if count >= size), (1, "B"))
    return f"{count / size:.4g}{unit}" if size > 1 else f"{count}B"
