"""From processes to a mesh of named axes.

torchrun starts the processes and tells each one its rank; the manifest names the axes. The axis written `*` takes what
the others leave of the world size. A single process needs no process group at all: every axis has size 1, and
collectives over it do nothing.

Two things happen here for the whole run. Before the first collective all ranks compare what they are going to run
(`handshake`), and later what they have read (`Mesh.agree`): ranks with different code would wait for each other's
collectives for ever. And `Mesh.together` runs what may fail on some ranks only (reading a file, writing a checkpoint)
so that either all ranks go on, or all raise the same error.
"""

from __future__ import annotations

import gc
import importlib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from mgraph.errors import MgraphError, did_you_mean
from mgraph.runtime import outbox
from mgraph.runtime.handshake import TIMEOUT, Facts, MeshError, disagreement, handshake

T = TypeVar("T")

DATA_AXES = ("dp", "ep", "fsdp")
"""Ranks along these axes see different microbatches; the first is major. Along all others they see the same."""

DEVICES = ("auto", "cpu", "cuda")
"""What `--device` may name: where to run; auto is cuda if there is one."""

_DISK_TIMEOUT = timedelta(hours=6)


@dataclass(frozen=True)
class Mesh:
    """Where this process stands: its rank, and for each named axis the size; `host` is the group of agreements."""

    rank: int
    world_size: int
    device: torch.device
    axes: dict[str, int]
    devices: DeviceMesh | None = field(default=None, repr=False)
    host: dist.ProcessGroup | None = field(default=None, repr=False)
    products: dict[str, tuple[int, DeviceMesh | None]] = field(default_factory=dict, repr=False)
    """Axes that are made of others: their sizes, and their ranks as one axis."""

    @property
    def position(self) -> dict[str, int]:
        """This rank's position along every axis."""
        return {axis: self.index(axis) for axis in self.axes}

    def beside(self) -> Mesh:
        """The same mesh for another thread, whose agreements cannot meet those of this one. All ranks call it.

        A rank may wait there for another's disk, for long; one that died is noticed by its closed connection.
        """
        if self.world_size == 1:
            return self
        return replace(self, host=dist.new_group(backend="gloo", timeout=_DISK_TIMEOUT))

    def size(self, axis: str) -> int:
        """Number of ranks along `axis`; an axis that the mesh lacks has one."""
        return self.products[axis][0] if axis in self.products else self.axes.get(axis, 1)

    def index(self, axis: str) -> int:
        """This rank's position along `axis`."""
        if axis in self.products:
            product = self.products[axis][1]
            return product.get_local_rank() if product is not None else 0
        return self.devices.get_local_rank(axis) if self.devices is not None and axis in self.axes else 0

    @property
    def data_size(self) -> int:
        """Number of ranks that see different microbatches."""
        return math.prod(self.axes.get(axis, 1) for axis in DATA_AXES)

    @property
    def data_rank(self) -> int:
        """This rank's position among them, which all ranks share that see the same."""
        place = 0
        for axis in (axis for axis in DATA_AXES if axis in self.axes):
            place = place * self.axes[axis] + self.index(axis)
        return place

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group of the ranks that differ from this one along `axis` only; its size must be above 1."""
        assert self.devices is not None, f"axis '{axis}' has no group: this is a single process"
        if axis in self.products:
            product = self.products[axis][1]
            assert product is not None, f"the product '{axis}' was declared"
            return product.get_group()
        return self.devices.get_group(axis)

    def declare(self, axes: Mapping[str, Any]) -> None:
        """Make the groups of those axes of a manifest that are products of others. All ranks call it."""
        for axis, parts in axes.items():
            if isinstance(parts, list):
                devices = None if self.devices is None else self.devices[tuple(parts)]._flatten(axis)
                self.products[axis] = math.prod(map(self.size, parts)), devices

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that prints and writes logs."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in rank order, on every rank. Values must pickle."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.host)
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

    def agree(self, facts: Facts) -> None:
        """Compare facts over all ranks. Raises a `MeshError` that names the ranks that differ, on every rank."""
        what = disagreement(self.gather(facts))
        if what is not None:
            raise MeshError(what, hint="give every machine the same files")

    def largest(self, value: int) -> int:
        """The largest `value` of all ranks: how ranks agree on a flag. A host-side collective, about 0.1 ms."""
        if self.world_size == 1:
            return value
        flag = torch.tensor(value)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.host)
        return int(flag)


ALONE = Mesh(0, 1, torch.device("cpu"), {})
"""A single process."""

_current = ALONE


def current() -> Mesh:
    """The mesh that collectives of emitted code run on; a single process until `start` was called."""
    return _current


def start(prepare: Callable[[], tuple[torch.device, dict[str, int], Facts]]) -> Mesh:
    """Join the processes that torchrun started into a mesh, and make it the current one.

    `prepare` gives this rank's device, the sizes of the axes and the facts that must be the same on all ranks. It is
    called before any process group exists; a `MgraphError` that it raises on one rank is raised on all.
    """
    global _current
    rank, world_size = environment()
    if world_size == 1:
        device, axes, _ = prepare()
        _current = Mesh(rank, world_size, device, axes)
        return _current

    def stated() -> tuple[tuple[torch.device, dict[str, int]], Facts]:
        device, axes, facts = prepare()
        return (device, axes), {"device": device.type, "mesh": axes_text(axes), **facts}

    try:
        store, _, _ = next(rendezvous("env://", rank, world_size, timeout=TIMEOUT))
    except dist.DistError as error:
        what = f"the {world_size} processes did not find each other: {str(error).splitlines()[0]}"
        raise MeshError(what, hint="look at the output of all of them") from error
    # A restarted group of workers meets the same store again: keys of the attempt before must not answer.
    store = c10d.PrefixStore(f"mgraph/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    device, axes = handshake(store, rank, world_size, stated)
    # Its functions keep, as defaults, the group that there is when they are imported: before there is one, none.
    importlib.import_module("torch.distributed.nn.functional")
    # Small host-side agreements go through gloo beside NCCL, so they never wait for the GPU.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    devices = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    _current = Mesh(rank, world_size, device, axes, devices)
    return _current


def stop() -> None:
    """Leave the process group; from here on this is a single process.

    The device mesh keeps the groups, and with them gloo's threads, which release tensors. Threads that still do so
    while the interpreter ends abort the process, so the mesh goes first, with all that still refers to it.
    """
    global _current
    if dist.is_initialized():
        outbox.forget()
        dist.destroy_process_group()
        _current = ALONE
        gc.collect()


def environment() -> tuple[int, int]:
    """(rank, world size) as torchrun says; a process started alone is rank 0 of 1."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def is_first_of_machine() -> bool:
    """Whether this process is the one of its machine that prints errors."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def share_of_threads() -> int:
    """The CPUs that this process may use, divided among the processes of this machine."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def bind_axes(declared: Mapping[str, Any], world_size: int, program: str = "train.py") -> dict[str, int]:
    """Sizes of the declared axes, where `*` takes the share of `world_size` that the other axes leave. Those that are
    products of others are left out. Raises MeshError, which names the `program` of the package that was started."""
    declared = {axis: size for axis, size in declared.items() if not isinstance(size, list)}
    fixed = math.prod(int(size) for size in declared.values() if size != "*")
    text = axes_text(declared)
    open_axes = [axis for axis, size in declared.items() if size == "*"]
    assert len(open_axes) <= 1, f"a mesh has at most one open axis: {text}"
    if world_size % fixed or (not open_axes and world_size != fixed):
        needed = f"a multiple of {fixed}" if open_axes else f"{fixed}"
        raise MeshError(
            f"the package's mesh {text} needs {needed} processes, and {world_size} were started",
            hint=f"torchrun --nproc-per-node {fixed} PKG/{program}, or compile for another --mesh",
        )
    return {axis: world_size // fixed if size == "*" else int(size) for axis, size in declared.items()}


def axes_text(axes: Mapping[str, int | str]) -> str:
    """A mesh as `--mesh` takes it."""
    return ",".join(f"{axis}={size}" for axis, size in axes.items()) or "one process"


def choose_device(device: str) -> torch.device:
    """The torch device of this process; on CUDA the one with torchrun's local rank. Raises MeshError for one that is
    not there, or not one of DEVICES."""
    if device not in DEVICES:
        raise MeshError(f"unknown device '{device}'", "--device", did_you_mean(device, DEVICES))
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
