"""Collectives over a named mesh axis, each in two halves: the start sends, `wait` gives the results.

Tensors that go together travel as one message per dtype: a flat copy of all of them, in which the part of each rank
lies in one piece. A tensor that lies that way already is sent as it is, and a gathered one is used where it was
received; on GPUs so are several of them, as one group of messages. What is sent and received lives until the `wait`,
which makes the current CUDA stream wait for the communication: memory that is freed afterwards cannot be in use by it.

Over an axis of one rank nothing is sent, and every collective gives back what it was handed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mgraph.runtime import later, mesh, outbox, traffic

_OPTIONS = {
    "all_reduce": "AllreduceCoalescedOptions",
    "all_gather": "AllgatherOptions",
    "reduce_scatter": "ReduceScatterOptions",
}
"""The options of grouped messages, in torch's module of process groups."""
_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

# Newer versions of torch have new names for these, and warn of the old ones.
_gather_flat: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_flat: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Work(Protocol):
    """Something under way."""

    def wait(self) -> Any:
        """Let the current stream wait for it."""


@dataclass(frozen=True)
class Message:
    """One communication: its work, what is sent (held, so that it lives), and what makes the results afterwards."""

    work: Work | None
    sent: Tensor | Sequence[Tensor]
    results: Callable[[], list[Tensor]]


@dataclass(frozen=True)
class Pending:
    """What is under way. By place: results that there are already, and the messages of all others."""

    results: dict[int, Tensor]
    messages: list[tuple[list[int], Message]]


_Send = Callable[[list[Tensor], dist.ProcessGroup, int], Message]
"""Sends tensors of one dtype to the ranks of a group, of which it is given the number."""


def all_reduce(tensors: Sequence[Tensor], axis: str, op: str = "sum") -> list[Tensor]:
    """Reduce each tensor over the ranks of `axis`, in place; returns the same tensors. `op` is sum, max or min."""
    return wait(all_reduce_start(tensors, axis, op))


def all_reduce_start(tensors: Sequence[Tensor], axis: str, op: str = "sum") -> Pending:
    """Begin `all_reduce`. The tensors must not be touched before `wait`."""

    def send(same: list[Tensor], group: dist.ProcessGroup, ranks: int) -> Message:
        if _sent_as_they_are(same):
            return Message(group.allreduce_coalesced(same, _options("all_reduce", op)), same, lambda: same)
        alone = len(same) == 1 and same[0].is_contiguous()
        flat = same[0] if alone else torch.cat([tensor.reshape(-1) for tensor in same])
        work = dist.all_reduce(flat, _REDUCTIONS[op], group=group, async_op=True)

        def results() -> list[Tensor]:
            if not alone:
                for target, piece in zip(same, flat.split([target.numel() for target in same]), strict=True):
                    target.copy_(piece.view(target.shape))
            return same

        return Message(work, flat, results)

    return _start("all_reduce", tensors, axis, send)


def all_gather(tensors: Sequence[Tensor], axis: str, dim: int) -> list[Tensor]:
    """Each tensor joined along `dim` with those of the other ranks of `axis`, in their order."""
    return wait(all_gather_start(tensors, axis, dim))


def all_gather_start(tensors: Sequence[Tensor], axis: str, dim: int, *, together: bool = False) -> Pending:
    """Begin `all_gather`. The tensors must not be written before `wait`. Results of one dtype that are `together` lie
    one after another in memory, along dim 0, but for what keeps each on a boundary of 16 bytes."""
    assert not together or dim == 0, "results lie together along the first dim"

    def send(same: list[Tensor], group: dist.ProcessGroup, ranks: int) -> Message:
        shapes = [tensor.shape for tensor in same]
        if _sent_as_they_are(same):
            gathered = _memory(same, ranks) if together else [t.new_empty(ranks, *t.shape) for t in same]
            work = group.allgather_into_tensor_coalesced(_flat(gathered), _flat(same), _options("all_gather"))
            return Message(work, same, lambda: [_joined(parts, dim) for parts in gathered])
        own = same[0].reshape(-1) if len(same) == 1 else torch.cat([tensor.reshape(-1) for tensor in same])
        everything = own.new_empty(ranks, own.numel())
        work = _gather_flat(everything.view(-1), own, group=group, async_op=True)
        wholes = _memory(same, ranks) if together else None

        def results() -> list[Tensor]:
            parts = _pieces(everything, shapes)
            if wholes is not None:
                parts = (whole.copy_(part) for whole, part in zip(wholes, parts, strict=True))
            return [_joined(part, dim) for part in parts]

        return Message(work, own, results)

    return _start("all_gather", tensors, axis, send)


def reduce_scatter(
    tensors: Sequence[Tensor], axis: str, dim: int, op: str = "sum", *, wide: bool = False
) -> list[Tensor]:
    """Reduce each tensor over the ranks of `axis`; each rank gets its part along `dim`, which divides. New tensors.

    `wide` is for sums of gradients that are narrower than f32: the ranks exchange their terms as they are, and each
    adds up those of its part in f32, which is the result. That sends exactly as many bytes as a reduction in the narrow
    dtype, but no partial sum is rounded on its way from rank to rank. Other dtypes are reduced as ever.
    """
    return wait(reduce_scatter_start(tensors, axis, dim, op, wide=wide))


def reduce_scatter_start(
    tensors: Sequence[Tensor], axis: str, dim: int, op: str = "sum", *, wide: bool = False
) -> Pending:
    """Begin `reduce_scatter`. The tensors must not be written before `wait`."""
    assert op == "sum" or not wide, f"a wide reduction is a sum, not {op}"

    def send(same: list[Tensor], group: dist.ProcessGroup, ranks: int) -> Message:
        parts = [_split(tensor, dim, ranks) for tensor in same]
        if _sent_as_they_are(parts) and not (wide and _is_narrow(parts[0])):
            scattered = [part.new_empty(part.shape[1:]) for part in parts]
            options = _options("reduce_scatter", op)
            work = group.reduce_scatter_tensor_coalesced(_flat(scattered), _flat(parts), options)
            return Message(work, parts, lambda: scattered)
        flat = parts[0].reshape(ranks, -1) if len(parts) == 1 else torch.cat([p.reshape(ranks, -1) for p in parts], 1)
        shapes = [part.shape[1:] for part in parts]
        received = flat.new_empty(flat.shape if wide and _is_narrow(flat) else flat.shape[1:])
        if wide and _is_narrow(flat):
            work = dist.all_to_all_single(received.view(-1), flat.view(-1), group=group, async_op=True)
        else:
            work = _reduce_scatter_flat(received, flat.view(-1), _REDUCTIONS[op], group=group, async_op=True)

        def results() -> list[Tensor]:
            own = received if received.dim() == 1 else torch.sum(received, 0, dtype=torch.float32)
            return [piece[0] for piece in _pieces(own[None], shapes)]

        return Message(work, flat, results)

    if mesh.current().size(axis) == 1 and wide:
        tensors = [tensor.float() if _is_narrow(tensor) else tensor for tensor in tensors]
    return _start("reduce_scatter", tensors, axis, send)


def all_to_all(
    tensors: Sequence[Tensor], axis: str, sizes: Tensor | None = None, *, back: bool = False
) -> list[Tensor]:
    """Of each tensor the n-th of as many equal parts of its first dim as `axis` has ranks goes to rank n; the parts
    that come in lie in the order of the ranks. New tensors of the same shapes.

    With `sizes`, i64 [2, n] on the CPU, as many rows go to each rank and come from each; `back` the other way round.
    """
    return wait(all_to_all_start(tensors, axis, sizes, back=back))


def all_to_all_start(
    tensors: Sequence[Tensor], axis: str, sizes: Tensor | None = None, *, back: bool = False
) -> Pending:
    """Begin `all_to_all`. The tensors must not be written before `wait`."""
    pending = _fetched(tensors, axis) if sizes is None else None
    pending = pending or _exchange(tensors, axis, sizes, back=back)
    later.catch_up()
    return pending


def _exchange(tensors: Sequence[Tensor], axis: str, sizes: Tensor | None, *, back: bool) -> Pending:
    """Begin `all_to_all` by torch's collective."""

    def send_rows(same: list[Tensor], group: dist.ProcessGroup, ranks: int) -> Message:
        assert sizes is not None, "rows are sent by sizes"
        own, others = sizes.tolist()[::-1] if back else sizes.tolist()
        widths = [math.prod(tensor.shape[1:]) for tensor in same]
        rows = [tensor.reshape(len(tensor), width) for tensor, width in zip(same, widths, strict=True)]
        flat = torch.cat(rows, 1) if len(rows) > 1 else rows[0].contiguous()
        received = flat.new_empty(sum(others), flat.shape[1])
        work = dist.all_to_all_single(received, flat, others, own, group=group, async_op=True)

        def results() -> list[Tensor]:
            parts = zip(received.split(widths, 1), same, strict=True)
            return [part.contiguous().view(-1, *tensor.shape[1:]) for part, tensor in parts]

        return Message(work, flat, results)

    def send(same: list[Tensor], group: dist.ProcessGroup, ranks: int) -> Message:
        parts = [_split(tensor, 0, ranks) for tensor in same]
        flat = torch.cat([p.reshape(ranks, -1) for p in parts], 1) if len(parts) > 1 else parts[0].contiguous()
        received = torch.empty_like(flat)
        work = dist.all_to_all_single(received.view(-1), flat.view(-1), group=group, async_op=True)

        def results() -> list[Tensor]:
            pieces = _pieces(received.view(ranks, -1), [part.shape[1:] for part in parts])
            return [piece.flatten(0, 1) for piece in pieces]

        return Message(work, flat, results)

    return _start("all_to_all", tensors, axis, send if sizes is None else send_rows)


def sendable(axis: str, site: Callable[..., Any], *inputs: Any) -> Any:
    """What a kernel site gives, where the other ranks of `axis` can fetch it, if they can: the next `all_to_all` over
    the axis takes it from there, and nothing may read it after that."""
    here = mesh.current()
    sent = here.size(axis) > 1 and here.device.type == "cuda"
    return outbox.sendable(here.group(axis) if sent else None, site, *inputs)


def _fetched(tensors: Sequence[Tensor], axis: str) -> Pending | None:
    """Begin `all_to_all` by copies (`outbox.py`), where all ranks of the axis are GPUs that reach each other's memory
    and the message is no small one."""
    here = mesh.current()
    ranks = here.size(axis)
    if ranks == 1 or not outbox.is_used() or not all(tensor.is_cuda for tensor in tensors):
        return None
    given = [tensor.contiguous() for tensor in tensors]
    exchanged = outbox.exchange(here.group(axis), given)
    if exchanged is None:
        return None
    traffic.note("all_to_all", axis, tensors, ranks)
    received, event = exchanged
    return Pending({}, [(list(range(len(given))), Message(event, given, lambda: received))])


def begin_entry() -> None:
    """What an entry that did not end has left is not that of the next: called before each time that one runs."""
    outbox.rewind()
    later.forget()


def wait(pending: Pending) -> list[Tensor]:
    """Finish what was started, once: its results, in the order of the tensors that it was started with."""
    results = dict(pending.results)
    for places, message in pending.messages:
        assert message.work is not None, "an asynchronous collective gives a work handle"
        message.work.wait()
        results.update(zip(places, message.results(), strict=True))
    # Whoever still holds the handle must hold no memory by it.
    pending.messages.clear()
    pending.results.clear()
    return [results[place] for place in range(len(results))]


def _options(what: str, op: str = "") -> Any:
    """Of a group of messages that goes on beside its caller, with a reduction where it has one."""
    options = getattr(dist.distributed_c10d, _OPTIONS[what])()
    options.asyncOp = True
    if op:
        options.reduceOp = _REDUCTIONS[op]
    return options


def _start(kind: str, tensors: Sequence[Tensor], axis: str, send: _Send) -> Pending:
    """Send the tensors of each dtype as one message."""
    here = mesh.current()
    ranks = here.size(axis)
    if ranks == 1:
        return Pending(dict(enumerate(tensors)), [])
    traffic.note(kind, axis, tensors, ranks)
    by_dtype: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(tensors):
        by_dtype.setdefault(tensor.dtype, []).append(place)
    sent = [
        (places, send([tensors[place] for place in places], here.group(axis), ranks)) for places in by_dtype.values()
    ]
    return Pending({}, sent)


def _sent_as_they_are(tensors: Sequence[Tensor]) -> bool:
    """Whether several tensors go as one group of messages, without a flat copy: NCCL sends groups at once."""
    return len(tensors) > 1 and all(tensor.is_cuda and tensor.is_contiguous() for tensor in tensors)


def _flat(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Each as one dim; views."""
    return [tensor.view(-1) for tensor in tensors]


def _memory(tensors: Sequence[Tensor], ranks: int) -> list[Tensor]:
    """Memory for the parts of all ranks [ranks, ...] of each tensor, in one piece, each on a boundary of 16 bytes."""
    unit = max(1, 16 // tensors[0].element_size())
    sizes = [-(-ranks * tensor.numel() // unit) * unit for tensor in tensors]
    pieces = tensors[0].new_empty(sum(sizes)).split(sizes)
    return [p[: ranks * t.numel()].view(ranks, *t.shape) for p, t in zip(pieces, tensors, strict=True)]


def _is_narrow(tensor: Tensor) -> bool:
    """Whether a sum in the tensor's own dtype is rounded more than one in f32."""
    return tensor.is_floating_point() and tensor.dtype.itemsize < 4


def _split(tensor: Tensor, dim: int, ranks: int) -> Tensor:
    """The equal parts of a tensor along `dim` as a new first dim; a view."""
    assert tensor.shape[dim] % ranks == 0, f"dim {dim} of {tuple(tensor.shape)} does not divide over {ranks} ranks"
    parts: Tensor = tensor.unflatten(dim, (ranks, tensor.shape[dim] // ranks)).movedim(dim, 0)
    return parts


def _joined(parts: Tensor, dim: int) -> Tensor:
    """The inverse of `_split`; a view where `parts` lies in order already."""
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def _pieces(rows: Tensor, shapes: Sequence[torch.Size]) -> Iterator[Tensor]:
    """The columns of each shape as [rows, *shape]; a view."""
    columns = rows.split([math.prod(shape) for shape in shapes], 1)
    return (part.view(rows.shape[0], *shape) for part, shape in zip(columns, shapes, strict=True))
