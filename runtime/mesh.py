"""From processes to a mesh of named axes.

torchrun starts the processes and tells each one its rank; the manifest names the axes. The axis written `*` takes what
the others leave of the world size. A single process needs no process group at all: every axis has size 1, and
collectives over it do nothing.

Two things happen here for the whole run. Before the first collective all ranks compare the fingerprint of the package
they loaded, through the store that torchrun provides: ranks with different code would wait for each other's collectives
for ever. And `Mesh.together` runs what may fail on some ranks only (reading a file, writing a checkpoint) so that
either all ranks go on, or all raise the same error.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from mgraph.errors import MgraphError

T = TypeVar("T")

DATA_AXIS = "dp"
"""Ranks along this axis see different microbatches."""

_HANDSHAKE_TIMEOUT = timedelta(minutes=5)


class MeshError(MgraphError):
    """The processes that were started do not fit the mesh of the package, or do not run the same package."""


@dataclass(frozen=True)
class Mesh:
    """Where this process stands: its rank, and for each named axis the size."""

    rank: int
    world_size: int
    device: torch.device
    axes: dict[str, int]
    devices: DeviceMesh | None = field(default=None, repr=False)

    def size(self, axis: str) -> int:
        """Number of ranks along `axis`; an axis that the mesh lacks has one."""
        return self.axes.get(axis, 1)

    def index(self, axis: str) -> int:
        """This rank's position along `axis`."""
        return self.devices.get_local_rank(axis) if self.devices is not None and axis in self.axes else 0

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group of the ranks that differ from this one along `axis` only; the axis must be larger than 1."""
        assert self.devices is not None, f"axis '{axis}' has no group: this is a single process"
        return self.devices.get_group(axis)

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that prints and writes logs."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in rank order, on every rank. Values must pickle."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def together(self, action: Callable[[], T]) -> T:
        """Run `action` on every rank; if it raises a `MgraphError` on any, the first such error is raised on all."""
        result, failure = None, None
        try:
            result = action()
        except MgraphError as error:
            failure = error
        failures = [error for error in self.gather(failure) if error is not None]
        if failures:
            raise failures[0]
        return result  # type: ignore[return-value]  # no failure anywhere: `action` returned it

    def largest(self, value: int) -> int:
        """The largest `value` of all ranks: how ranks agree on a flag. A host-side collective, about 0.1 ms."""
        if self.world_size == 1:
            return value
        flag = torch.tensor(value)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return int(flag)

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()


_current = Mesh(0, 1, torch.device("cpu"), {})


def current() -> Mesh:
    """The mesh that collectives of emitted code run on; a single process until `start` was called."""
    return _current


def start(declared: dict[str, int | str], device: str, fingerprint: str) -> Mesh:
    """Bind the axes that the manifest declares to the processes torchrun started, and make it the current mesh.

    `device` is `cpu`, `cuda` or `auto` (cuda where there is one); `fingerprint` is compared over all ranks.
    """
    global _current
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    axes = bind_axes(declared, world_size)
    place = choose_device(device)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    devices = None
    if world_size > 1:
        _initialise(place, rank, world_size, fingerprint)
        devices = init_device_mesh(place.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    _current = Mesh(rank, world_size, place, axes, devices)
    return _current


def bind_axes(declared: dict[str, int | str], world_size: int) -> dict[str, int]:
    """Sizes of the declared axes, where `*` takes the share of `world_size` that the other axes leave."""
    fixed = math.prod(int(size) for size in declared.values() if size != "*")
    text = ",".join(f"{axis}={size}" for axis, size in declared.items()) or "one process"
    open_axes = [axis for axis, size in declared.items() if size == "*"]
    assert len(open_axes) <= 1, f"a mesh has at most one open axis: {text}"
    if world_size % fixed or (not open_axes and world_size != fixed):
        needed = f"a multiple of {fixed}" if open_axes else f"{fixed}"
        raise MeshError(
            f"the package's mesh {text} needs {needed} processes, and {world_size} were started",
            hint=f"torchrun --nproc-per-node {fixed} PKG/train.py, or compile for another --mesh",
        )
    return {axis: world_size // fixed if size == "*" else int(size) for axis, size in declared.items()}


def choose_device(device: str) -> torch.device:
    """The torch device of this process; on CUDA the one with torchrun's local rank."""
    available = torch.cuda.is_available()
    if device == "cpu" or (device == "auto" and not available):
        return torch.device("cpu")
    if not available:
        raise MeshError("--device cuda: this machine has no CUDA device that torch can use", hint="--device cpu")
    local_rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local_rank >= count:
        raise MeshError(
            f"process {local_rank} of this machine has no GPU of its own: there are {count}",
            hint=f"torchrun --nproc-per-node {count}",
        )
    return torch.device("cuda", local_rank)


def _initialise(device: torch.device, rank: int, world_size: int, fingerprint: str) -> None:
    """Compare fingerprints through torchrun's store, then make the process group on the same store."""
    store, _, _ = next(rendezvous("env://", rank, world_size, timeout=_HANDSHAKE_TIMEOUT))
    # A restarted group of workers meets the same store again: keys of the attempt before must not answer.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    handshake(dist.PrefixStore(f"mgraph/{attempt}", store), rank, world_size, fingerprint)
    # Small host-side agreements go through gloo beside NCCL, so they never wait for the GPU.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)


def handshake(store: dist.Store, rank: int, world_size: int, fingerprint: str) -> None:
    """Raise `MeshError` on every rank, naming the ranks whose fingerprint differs from that of rank 0.

    Rank 0 reads all fingerprints and publishes a verdict, so the store sees a number of requests linear in the ranks.
    """
    store.set(f"fingerprint/{rank}", fingerprint)
    if rank == 0:
        others = [store.get(f"fingerprint/{other}").decode() for other in range(world_size)]
        different = [str(other) for other, value in enumerate(others) if value != fingerprint]
        store.set("verdict", ",".join(different) or "same")
    verdict = store.get("verdict").decode()
    if verdict != "same":
        raise MeshError(
            f"rank {verdict} runs another package, runtime or torch than rank 0 (their fingerprints differ)",
            hint="copy the same package directory to every machine, with the same versions installed",
        )
