"""Messages between GPUs of one machine that no multiprocessor carries: a rank leaves what it sends in its outbox, and
the others copy their parts from there, by copy engines.

A kernel that carries messages (NCCL's) takes multiprocessors from the products that run meanwhile, whose last programs
then wait for it: such a product lasts longer by all that the message takes. Copies take none. (Two H200: a product of
1.39 ms beside 134 MB by NCCL 1.70 ms, by copies 1.49; alone the message takes 0.27 and 0.20 ms.)

An outbox has some places, which messages use in turns; those of all ranks lie in memory that the others can read
(`torch.distributed._symmetric_memory`). For each place and each other rank there are two flags in each rank's memory:

    free   the other has fetched what lay there      up at first; waited for, and taken down, before it is written
    there  the other's message lies in its place     waited for, and taken down, before it is copied

Flags are written and waited for by the queues of the GPUs themselves (`cuStreamWriteValue32`, `cuStreamWaitValue32`):
no kernel runs for them, and as all are as they began after each message, a CUDA graph of messages may be replayed. Such
a wait has no end of its own: where a rank never comes, the watchdog of NCCL ends the others, by the messages that are
still its own (sums over ranks at the end of a step).
"""

from __future__ import annotations

import functools
import importlib.util
import math
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

PLACES = 3
"""Messages that an outbox has room for: one that is fetched, one that is written, and one for a rank that is behind."""

UNIT = 256
"""Bytes on whose boundary each tensor of a message begins."""

LEAST = 1 << 20
"""Bytes of the least message that is copied: kernels carry small ones sooner."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass
class Links:
    """The places and flags of all ranks of a group, as this rank reaches them."""

    rank: int
    places: Sequence[Sequence[Tensor]]
    """By place and rank: bytes, u8 [size]."""
    flags: Sequence[int]
    """By rank where its flags are, i32 [2, PLACES, ranks], of which the first half is 1 and the second 0."""
    held: Any = None
    """What all this lies in."""

    @classmethod
    def join(cls, group: dist.ProcessGroup, size: int, device: torch.device) -> Links:
        """Make places of `size` bytes. All ranks of the group call it. Raises RuntimeError where that is impossible."""
        import torch.distributed._symmetric_memory as symmetric

        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        flags = symmetric.empty(2 * PLACES * ranks, dtype=torch.int32, device=device)
        flags.copy_(new_flags(ranks))
        own = [symmetric.empty(size, dtype=torch.uint8, device=device) for _ in range(PLACES)]
        of_flags, *of_places = [symmetric.rendezvous(memory, group) for memory in (flags, *own)]
        places = [
            [mine if other == rank else seen.get_buffer(other, [size], torch.uint8) for other in range(ranks)]
            for mine, seen in zip(own, of_places, strict=True)
        ]
        _settle(group, device)  # all have written their flags
        return cls(rank, places, [int(at) for at in of_flags.buffer_ptrs], (flags, of_flags, of_places))

    @property
    def ranks(self) -> range:
        """All ranks of the group."""
        return range(len(self.flags))

    def wait_free(self, place: int, stream: torch.cuda.Stream) -> None:
        """Let a stream wait until all others have fetched what lay in a place of this rank; then it is taken."""
        for rank in self._others():
            self._await(self._address(self.rank, 0, place, rank), stream)

    def tell(self, place: int, stream: torch.cuda.Stream) -> None:
        """Tell the others that what they get lies in this rank's place."""
        for rank in self._others():
            self._write(self._address(rank, 1, place, self.rank), 1, stream)

    def wait_there(self, place: int, stream: torch.cuda.Stream) -> None:
        """Let a stream wait until what the others send lies in their places."""
        for rank in self._others():
            self._await(self._address(self.rank, 1, place, rank), stream)

    def fetched(self, place: int, stream: torch.cuda.Stream) -> None:
        """Tell the others that this rank needs nothing more of their places."""
        for rank in self._others():
            self._write(self._address(rank, 0, place, self.rank), 1, stream)

    def give_up(self, place: int, stream: torch.cuda.Stream) -> None:
        """A place of this rank that was taken is sent to nobody: it is free again."""
        for rank in self._others():
            self._write(self._address(self.rank, 0, place, rank), 1, stream)

    def _others(self) -> Iterator[int]:
        return (rank for rank in self.ranks if rank != self.rank)

    def _address(self, owner: int, kind: int, place: int, rank: int) -> int:
        return self.flags[owner] + 4 * ((kind * PLACES + place) * len(self.flags) + rank)

    def _await(self, address: int, stream: torch.cuda.Stream) -> None:
        """Wait for a flag, and take it down."""
        _checked(_driver().cuStreamWaitValue32(stream.cuda_stream, address, 1, _EQUAL))
        self._write(address, 0, stream)

    def _write(self, address: int, value: int, stream: torch.cuda.Stream) -> None:
        _checked(_driver().cuStreamWriteValue32(stream.cuda_stream, address, value, 0))


_EQUAL = 1
"""CU_STREAM_WAIT_VALUE_EQ."""


@functools.cache
def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def _checked(answer: tuple[Any, ...]) -> None:
    if int(answer[0]) != 0:
        raise RuntimeError(f"the CUDA driver says {answer[0].name} for a message between GPUs")


def new_flags(ranks: int) -> Tensor:
    """Flags as they begin: every place is free, nothing is there."""
    return torch.tensor([1, 0], dtype=torch.int32).repeat_interleave(PLACES * ranks)


@dataclass
class Outbox:
    """The places of this rank for messages to a group, of `size` bytes each."""

    links: Links
    size: int
    stream: torch.cuda.Stream
    captured: bool = False
    """Whether a CUDA graph may know it."""
    _next: int = 0
    _open: int | None = None
    """The place that is being written."""
    _used: int = 0
    """Bytes of it that are taken."""
    _opened_in_capture: bool = False

    def rewind(self) -> None:
        """Begin with the first place again: so places of an entry are the same whether it is replayed or launched."""
        self.abandon()
        self._next = 0

    def abandon(self) -> None:
        """What lies in the place that is written is not sent from there. Its flags are put up again, but for those that
        a capture which has failed would have taken down."""
        in_capture = torch.cuda.is_current_stream_capturing()
        if self._open is not None and self._opened_in_capture == in_capture:
            self.links.give_up(self._open, torch.cuda.current_stream())
        self._open, self._used = None, 0

    def new(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """A new contiguous tensor in the place that is written, to be sent by the next message; None without room."""
        count = math.prod(shape) * dtype.itemsize
        begin = -(-self._used // UNIT) * UNIT if self._open is not None else 0
        if begin + count > self.size:
            return None
        if self._open is None:
            self._open, self._next = self._next, (self._next + 1) % PLACES
            self._opened_in_capture = torch.cuda.is_current_stream_capturing()
            self.captured = self.captured or self._opened_in_capture
            self.links.wait_free(self._open, torch.cuda.current_stream())
        self._used = begin + count
        return self._own(self._open)[begin : begin + count].view(dtype).view(*shape)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the place that is written."""
        if self._open is None:
            return False
        begin = tensor.data_ptr() - self._own(self._open).data_ptr()
        return 0 <= begin < self._used

    def exchange(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], torch.cuda.Event] | None:
        """Send each other rank its part of the first dim of contiguous tensors; what comes in, and an event after which
        it is there. What does not lie in the place that is written yet is put there; None where it has no room."""
        placed = [self._placed(tensor) for tensor in tensors]
        if self._open is None or any(there is None for there in placed):
            self.abandon()
            return None
        place, stream = self._open, self.stream
        self._open, self._used = None, 0
        received = [torch.empty_like(tensor) for tensor in tensors]
        stream.wait_stream(torch.cuda.current_stream())
        self.links.tell(place, stream)
        self.links.wait_there(place, stream)
        with torch.cuda.stream(stream):
            for target, there in zip(received, placed, strict=True):
                assert there is not None
                self._fetch(place, target, there)
        self.links.fetched(place, stream)
        done = torch.cuda.Event()
        done.record(stream)
        for target, tensor in zip(received, tensors, strict=True):
            if not _made(target, tensor, self.links.rank, len(self.links.ranks)):
                _part(target, self.links.rank, self.links).copy_(_part(tensor, self.links.rank, self.links))
        return received, done

    def _own(self, place: int) -> Tensor:
        return self.links.places[place][self.links.rank]

    def _placed(self, tensor: Tensor) -> Tensor | None:
        """A tensor, of which at least the parts for others lie in the place that is written."""
        if self.holds(tensor):
            return tensor
        copy = self.new(tensor.shape, tensor.dtype)
        if copy is not None:
            for rank in self.links.ranks:
                if rank != self.links.rank:
                    _part(copy, rank, self.links).copy_(_part(tensor, rank, self.links))
        return copy

    def _fetch(self, place: int, target: Tensor, there: Tensor) -> None:
        """Copy what the others send of a tensor: each has it where this rank has its own."""
        part = there.nbytes // len(self.links.ranks)
        begin = there.data_ptr() - self._own(place).data_ptr() + self.links.rank * part
        for rank in self.links.ranks:
            if rank != self.links.rank and part:
                _part(target, rank, self.links).copy_(self.links.places[place][rank][begin : begin + part])


def _part(tensor: Tensor, rank: int, links: Links) -> Tensor:
    """The bytes of a rank's part of a contiguous tensor."""
    ranks = len(links.ranks)
    return tensor.view(-1).view(torch.uint8).view(ranks, tensor.nbytes // ranks)[rank]


def _made(target: Tensor, tensor: Tensor, rank: int, ranks: int) -> bool:
    """Whether this rank's own part of a tensor had been put off: it is made in that of the target then."""
    make = _boxes.put_off.pop(tensor.data_ptr(), None)
    if make is not None:
        make(target.view(ranks, -1)[rank].view(-1))
    return make is not None


@dataclass
class _Boxes:
    """The outboxes of a process: by group, None where its ranks cannot copy from each other."""

    used: bool = False
    """Whether messages go by copies at all."""
    by_group: dict[dist.ProcessGroup, Outbox | None] = field(default_factory=dict)
    meant: Outbox | None = None
    """Where new results of kernels go."""
    put_off: dict[int, Callable[[Tensor], None]] = field(default_factory=dict)
    """By where a new result begins: what makes this rank's own part of it, in a tensor of one dim."""


_boxes = _Boxes()


def exchange(group: dist.ProcessGroup, tensors: Sequence[Tensor]) -> tuple[list[Tensor], torch.cuda.Event] | None:
    """See `Outbox.exchange`. None where the message has to go in another way, of tensors that are whole then: a small
    one, one between ranks that cannot copy from each other, or a larger one than ever while CUDA graphs know the outbox
    that there is. All ranks of the group call it, with as much to send."""
    size = sum(-(-tensor.nbytes // UNIT) * UNIT for tensor in tensors)
    box = _boxes.by_group.get(group)
    begun = box is not None and any(map(box.holds, tensors))
    if size >= LEAST and (box is None or box.size < size):
        box = _larger(group, size, tensors[0].device)
    exchanged = box.exchange(tensors) if box is not None and (begun or size >= LEAST) else None
    if exchanged is None:
        for tensor in tensors:
            _made(tensor, tensor, dist.get_rank(group), dist.get_world_size(group))
    return exchanged


def _larger(group: dist.ProcessGroup, size: int, device: torch.device) -> Outbox | None:
    """An outbox for messages of `size` bytes to a group, in place of a smaller one. The one that there is where CUDA
    graphs know it, or are captured; None where the ranks cannot copy from each other, which is found out once."""
    box = _boxes.by_group.get(group)
    if (group in _boxes.by_group and (box is None or box.captured)) or torch.cuda.is_current_stream_capturing():
        return box
    if box is not None:
        box.abandon()
        _settle(group, device)
    _boxes.by_group[group] = None
    if _can_copy(group, device):
        try:
            links = Links.join(group, size, device)
        except RuntimeError:  # torch raises nothing more exact
            links = None
        if all(_of_all(group, links is not None)) and links is not None:
            _boxes.by_group[group] = Outbox(links, size, torch.cuda.Stream(device, priority=-1))
    return _boxes.by_group[group]


def _settle(group: dist.ProcessGroup, device: torch.device) -> None:
    """Wait until all that all ranks of a group have begun is done."""
    torch.cuda.synchronize(device)
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    torch.cuda.synchronize(device)


def _can_copy(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the ranks of a group are GPUs of one machine that reach each other's memory."""
    machine = socket.gethostname() + (_BOOT.read_text() if _BOOT.exists() else "")
    places = _of_all(group, (machine, device.index))
    others = [index for _, index in places if index != device.index]
    able = len({name for name, _ in places}) == 1 and len(others) == len(places) - 1
    able = able and all(torch.cuda.can_device_access_peer(device.index, index) for index in others)
    return all(_of_all(group, able and importlib.util.find_spec("cuda.bindings") is not None))


def _of_all(group: dist.ProcessGroup, fact: Any) -> list[Any]:
    """What all ranks of a group say."""
    facts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(facts, fact, group=group)
    return facts


def use(copies: bool) -> None:
    """Say whether messages go by copies from now on, on all ranks alike, before the first."""
    _boxes.used = copies


def is_used() -> bool:
    """Whether messages go by copies where they can."""
    return _boxes.used


def rewind() -> None:
    """An entry begins."""
    _boxes.put_off.clear()
    for box in _boxes.by_group.values():
        if box is not None:
            box.rewind()


def sendable(group: dist.ProcessGroup | None, site: Callable[..., Any], *inputs: Any) -> Any:
    """What a kernel site gives, in the outbox for a group, if there is one: the next message to the group takes it from
    there, and nothing else may read it after that."""
    before, _boxes.meant = _boxes.meant, None if group is None else _boxes.by_group.get(group)
    try:
        return site(*inputs)
    finally:
        _boxes.meant = before


def is_meant() -> bool:
    """Whether results of kernels go to an outbox."""
    return _boxes.meant is not None


def new_result(shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
    """Memory for a contiguous result of a kernel in the outbox that is meant; None without room."""
    assert _boxes.meant is not None, "an outbox is meant"
    return _boxes.meant.new(shape, dtype)


def parts(result: Tensor, rows: int) -> tuple[tuple[int, int], list[tuple[int, int]]] | None:
    """Which rows of a result this rank has for itself, and which others get, where it lies in the outbox that is meant:
    first and end of each run. None where it does not, or where each rank would get nothing."""
    box = _boxes.meant
    if box is None or not box.holds(result) or rows % len(box.links.ranks) or not rows:
        return None
    rank, own = box.links.rank, rows // len(box.links.ranks)
    runs = [(0, rank * own), ((rank + 1) * own, rows)]
    return (rank * own, (rank + 1) * own), [run for run in runs if run[0] < run[1]]


def put_off(result: Tensor, make: Callable[[Tensor], None]) -> None:
    """Leave this rank's own part of a new result to when the others' parts are under way: `make` writes it to a tensor
    of one dim."""
    _boxes.put_off[result.data_ptr()] = make


def forget() -> None:
    """Give up all outboxes: their groups end."""
    _boxes.put_off.clear()
    _boxes.by_group.clear()
