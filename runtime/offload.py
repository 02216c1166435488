"""Copies between the device and the host on streams of their own, each in two halves: the start, then `wait`.

What goes to the host goes to pinned memory, which is taken from a store and given back when what it holds has come
back: so it is pinned in the first step only, and a CUDA graph that is captured afterwards finds its buffers there. Each
direction has its stream. A buffer is given back when the current stream waits for its copy back, and a copy starts
after all that the current stream has enqueued: so a buffer is taken again only when that copy is through. Tensors of
the device that a copy reads live, in the handle, until the `wait`, which makes the current stream wait for the copy: so
their memory, too, is taken again only afterwards. On the CPU the same are plain copies.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from mgraph.runtime.collectives import Message, Pending

late_copies = False
"""Whether copies of the CPU are made as late as those of a stream may be, at the `wait`; see `poison.py`."""
_free: dict[tuple[Any, ...], list[Tensor]] = {}
"""Buffers of the host that hold nothing, by form and device."""
_taken: dict[int, tuple[Any, ...]] = {}
"""Buffers that hold something, by address: where they are given back to."""


def to_host_start(tensors: Sequence[Tensor]) -> Pending:
    """Begin to copy tensors to the host; they must not be written before `wait`, which gives the copies."""
    buffers = [_take(tensor) for tensor in tensors]
    return _copies(buffers, tensors, tensors[0].device, tensors)


def to_device_start(tensors: Sequence[Tensor]) -> Pending:
    """Begin to copy tensors of the host, state or what `to_host_start` gave, to the device; `wait` gives the copies.

    Buffers of `to_host_start` are given back: what they hold is not to be read again.
    """
    form = _taken.get(tensors[0].data_ptr())
    device: torch.device = _device_of(tensors[0]) if form is None else form[-1]
    made = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device) for t in tensors]

    def give_back() -> None:
        for tensor in tensors:
            if (form := _taken.pop(tensor.data_ptr(), None)) is not None:
                _free[form].append(tensor)

    return _copies(made, tensors, device, (), give_back)


def store_start(states: Sequence[Tensor], tensors: Sequence[Tensor]) -> Pending:
    """Begin to copy tensors over states of the host, which `wait` gives; neither must be touched before that."""
    return _copies(states, tensors, tensors[0].device, tensors)


def on_host(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A state in the memory of the host, pinned where `device` is a GPU."""
    if torch.device(device).type != "cuda":
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor)


def _device_of(tensor: Tensor) -> torch.device:
    """The device that works with a state of the host: the current GPU where it is pinned, else the CPU."""
    pinned = torch.cuda.is_available() and tensor.is_pinned()
    return torch.device("cuda", torch.cuda.current_device()) if pinned else tensor.device


class _Copied:
    """Copies on the stream of copies, until an event; on the CPU what is left to do."""

    def __init__(self, event: torch.cuda.Event | None, left: Callable[[], None] | None = None) -> None:
        self._event, self._left = event, left

    def wait(self) -> None:
        """Let the current stream wait for them."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        if self._left is not None:
            self._left()


def _copies(
    targets: Sequence[Tensor],
    sources: Sequence[Tensor],
    device: torch.device,
    held: Sequence[Tensor],
    ended: Callable[[], None] = lambda: None,
) -> Pending:
    """Copy each source into its target after all that the current stream has enqueued. `held` live until the wait, and
    `ended` is called there."""
    event, left = None, None
    if device.type == "cuda":
        stream = _stream(device, to_host=bool(held))
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            _copy(targets, sources)
            event = torch.cuda.Event()
            event.record(stream)
    elif late_copies:
        left = functools.partial(_copy, targets, [_unowned(source) for source in sources])
    else:
        _copy(targets, sources)
    targets = list(targets)

    def results() -> list[Tensor]:
        ended()
        return targets

    return Pending({}, [(list(range(len(targets))), Message(_Copied(event, left), list(held), results))])


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)


def _unowned(tensor: Tensor) -> Tensor:
    """The same memory of the CPU, which this does not keep alive: as a copy of a stream sees it."""
    with _disable_current_modes():
        storage = tensor.untyped_storage()
        array = (ctypes.c_byte * storage.nbytes()).from_address(storage.data_ptr())
        flat = torch.frombuffer(array, dtype=torch.uint8).view(tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@functools.cache
def _stream(device: torch.device, *, to_host: bool) -> torch.cuda.Stream:
    """The stream of a device's copies in one direction."""
    return torch.cuda.Stream(device)


def _take(tensor: Tensor) -> Tensor:
    """A buffer of the host that lies as a tensor does; where that has gaps, in rows."""
    like = torch.empty_like(tensor, device="meta")
    form = (tuple(like.shape), like.stride(), tensor.dtype, tensor.device)
    free = _free.setdefault(form, [])
    if not free:
        pin = tensor.device.type == "cuda"
        free.append(torch.empty_strided(form[0], form[1], dtype=tensor.dtype, pin_memory=pin))
    buffer = free.pop()
    _taken[buffer.data_ptr()] = form
    return buffer
