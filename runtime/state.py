"""Make the state of a package: parameters, optimizer moments, accumulators.

Nothing is loaded or unpickled. The manifest holds, for each tensor, the initialiser calls that the model made when it
was built, and they are replayed here. Random calls count by global element index under the key
(seed, seed name, call index), so the values depend on neither the mesh, nor the order of creation, nor the device.

A tensor may start as the copy of another (`copy_from`). Copies are made after what they copy.

On a mesh a rank keeps its share of a tensor that is split (`shards.py`): the whole is drawn, one tensor at a time, and
the rest let go.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mgraph import philox
from mgraph.errors import PackageError
from mgraph.runtime.mesh import Mesh
from mgraph.runtime.package import State, StateSpec

# Calls that draw nothing and take plain numbers.
_PLAIN_CALLS: dict[str, Callable[..., Tensor]] = {
    "zeros_": Tensor.zero_,
    "fill_": Tensor.fill_,
    "mul_": Tensor.mul_,
    "add_": Tensor.add_,
    "clamp_": Tensor.clamp_,
    "erfinv_": Tensor.erfinv_,
}


def create_state(
    specs: Iterable[StateSpec],
    seed: int,
    device: torch.device | str,
    blank: Collection[str] = (),
    mesh: Mesh | None = None,
) -> State:
    """All tensors of `specs` by name, initialised with `seed`, on `device`; those in `blank`, and copies of them, hold
    nothing yet. With a `mesh`, this rank's shares of them.

    Raises `PackageError` where a tensor has no initialiser, names an unknown call, or copies in a circle.
    """
    by_name = {spec.name: spec for spec in specs}
    state: State = {}

    def create(spec: StateSpec, waiting: tuple[str, ...]) -> None:
        for source in (call[1] for call in spec.init if call[0] == "copy_from"):
            if source not in by_name or source in waiting:
                problem = "copies itself" if source in waiting else f"copies '{source}', which does not exist"
                raise _error(spec, problem)
            if source not in state:
                create(by_name[source], (*waiting, source))
        if spec.name in blank or any(call[:1] == ("copy_from",) and call[1] in blank for call in spec.init):
            shape = spec.shape if mesh is None else spec.share(mesh).shape
            state[spec.name] = torch.empty(shape, dtype=spec.dtype, device=device)
            return
        copies = any(call[0] == "copy_from" for call in spec.init)
        shape = spec.share(mesh).shape if copies and mesh is not None else spec.shape
        made = _initialise(spec, shape, state, seed, torch.device(device))
        state[spec.name] = made if copies or mesh is None else share_of_whole(spec, made, mesh)

    for spec in by_name.values():
        if spec.name not in state:
            create(spec, (spec.name,))
    return {name: state[name] for name in by_name}


def share_of_whole(spec: StateSpec, whole: Tensor, mesh: Mesh) -> Tensor:
    """This rank's share of a whole tensor; the same tensor where it is all of it."""
    share = spec.share(mesh)
    if share.shape == spec.shape:
        return whole
    local = whole.new_zeros(share.shape)
    for piece in share.pieces:
        source = tuple(slice(start, start + size) for start, size in zip(piece.whole, piece.sizes, strict=True))
        piece.of(local).copy_(whole[source])
    return local


def whole_tensors(state: State, specs: Iterable[StateSpec], mesh: Mesh) -> State:
    """The state with the tensors of `specs` whole, on every rank: a collective of the ranks that share them."""
    made = dict(state)
    for spec in specs:
        if spec.share(mesh).shape == spec.shape:
            continue
        tensor = state[spec.name]
        for split in reversed(spec.placement):
            if mesh.size(split.axis) > 1:
                assert split.factor is None and not split.zigzag, f"{spec.name}: {split} has no whole made of parts"
                parts = [torch.empty_like(tensor) for _ in range(mesh.size(split.axis))]
                dist.all_gather(parts, tensor.contiguous(), group=mesh.group(split.axis))
                tensor = torch.cat(parts, split.dim)
        assert tuple(tensor.shape) == spec.shape, f"{spec.name}: parts of unequal extents have no whole made of them"
        made[spec.name] = tensor
    return made


def _initialise(spec: StateSpec, shape: tuple[int, ...], state: State, seed: int, device: torch.device) -> Tensor:
    if not spec.init:
        raise _error(spec, "has no initialiser")
    # A program for a low-precision tensor runs in f32 and is rounded once, as casting an initialised model would.
    low_precision = spec.dtype.is_floating_point and spec.dtype.itemsize < 4
    tensor = torch.empty(shape, dtype=torch.float32 if low_precision else spec.dtype, device=device)
    for index, (call, *arguments) in enumerate(spec.init):
        _replay(tensor, call, arguments, state, seed, philox.key_from(seed, spec.seed_name, index), spec)
    return tensor.to(spec.dtype)


def _replay(
    tensor: Tensor, call: str, arguments: list[Any], state: State, seed: int, key: philox.Key, spec: StateSpec
) -> None:
    """Apply one recorded in-place call to `tensor`."""
    if call == "normal_":
        mean, deviation = arguments
        draw = philox.normal(tensor.shape, key, dtype=tensor.dtype, device=tensor.device)
        tensor.copy_(draw.mul_(deviation).add_(mean))
    elif call == "uniform_":
        low, high = arguments
        draw = philox.uniform(tensor.shape, key, dtype=tensor.dtype, device=tensor.device)
        tensor.copy_(draw.mul_(high - low).add_(low))
    elif call == "copy_":
        (values,) = arguments
        if len(values) != math.prod(spec.shape):
            raise _error(spec, f"has {len(values)} initial values for shape {list(spec.shape)}")
        tensor.copy_(torch.tensor(values, dtype=tensor.dtype).reshape(spec.shape))
    elif call == "copy_from":
        source = state[arguments[0]]
        if source.shape != tensor.shape:
            raise _error(spec, f"copies '{arguments[0]}', whose shape is {list(source.shape)}")
        tensor.copy_(source)
    elif call == "seed_":
        tensor.fill_(seed)
    elif call == "fill_range_":
        start, stop, value = arguments
        tensor.view(-1)[start:stop] = value
    elif call in _PLAIN_CALLS:
        _PLAIN_CALLS[call](tensor, *arguments)
    else:
        raise _error(spec, f"is initialised by '{call}', which this runtime does not know")


def _error(spec: StateSpec, problem: str) -> PackageError:
    return PackageError(f"state '{spec.name}' {problem}", where="manifest.json", hint="compile the package again")
