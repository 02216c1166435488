"""Make the state of a package: parameters, optimizer moments, accumulators.

Nothing is loaded or unpickled. The manifest holds, for each tensor, the initialiser calls that the model made when it
was built, and they are replayed here. Random calls count by global element index under the key
(seed, seed name, call index), so the values depend on neither the mesh, nor the order of creation, nor the device.
On a mesh a rank makes its share of a tensor that is split (`shards.py`), and no more than that. A tensor may start as
the copy of another (`copy_from`), however that is split: it is made like it once more.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mgraph import philox
from mgraph.errors import PackageError
from mgraph.runtime.collectives import all_gather
from mgraph.runtime.mesh import ALONE, Mesh
from mgraph.runtime.offload import on_host
from mgraph.runtime.package import State, StateSpec
from mgraph.runtime.shards import Piece

# Calls that draw nothing and take plain numbers.
_PLAIN_CALLS: dict[str, Callable[..., Tensor]] = {
    "zeros_": Tensor.zero_,
    "fill_": Tensor.fill_,
    "mul_": Tensor.mul_,
    "add_": Tensor.add_,
    "clamp_": Tensor.clamp_,
    "erfinv_": Tensor.erfinv_,
}

_DRAWS = {"normal_": philox.normal, "uniform_": philox.uniform}


def create_state(
    specs: Iterable[StateSpec],
    seed: int,
    device: torch.device | str,
    blank: Collection[str] = (),
    mesh: Mesh = ALONE,
) -> State:
    """This rank's shares of all tensors of `specs` by name, initialised with `seed`, on `device`; those in `blank`, and
    copies of them, are 0. What is `host` lies in the host's memory; what is `after` another begins where that ends.

    Raises `PackageError` where a tensor has no initialiser, names an unknown call, or copies in a circle.
    """
    by_name = {spec.name: spec for spec in specs}
    initial = _Initial(by_name, seed, torch.device(device))
    masters = {
        _start_of(spec, mesh): spec for spec in by_name.values() if spec.kind == "master" and spec.name not in blank
    }

    def placed(spec: StateSpec, tensor: Tensor) -> Tensor:
        return on_host(tensor, device) if spec.host else tensor

    state: State = {}
    for spec in by_name.values():
        master = masters.get(_start_of(spec, mesh), spec)
        if not set(initial.sources(spec)).isdisjoint(blank):
            state[spec.name] = placed(spec, torch.zeros(spec.share(mesh).shape, dtype=spec.dtype, device=device))
        elif master is not spec:  # drawn once for both: a draw in low precision is one in f32, rounded at the end
            if master.name not in state:
                state[master.name] = placed(master, initial.share(master, mesh))
            state[spec.name] = state[master.name].to(device, spec.dtype, copy=True)
        elif spec.name not in state:
            state[spec.name] = placed(spec, initial.share(spec, mesh))
    lay_together(state, {spec.name: spec.after for spec in by_name.values() if spec.after})
    return {name: state[name] for name in by_name}


def lay_together(state: State, after: Mapping[str, str]) -> None:
    """Put tensors that one product reads one after another: `after` has the name of the one before each."""
    following = {before: name for name, before in after.items()}
    for first in following.keys() - after.keys():
        names = [first]
        while names[-1] in following:
            names.append(following[names[-1]])
        sizes = [state[name].numel() for name in names]
        whole = torch.cat([state[name].flatten() for name in names])
        state.update((n, part.view(state[n].shape)) for n, part in zip(names, whole.split(sizes), strict=True))


def _start_of(spec: StateSpec, mesh: Mesh) -> tuple[Any, ...]:
    """What the values that a rank begins with depend on, but for their dtype."""
    return spec.seed_name, repr(spec.init), spec.shape, spec.share(mesh)


def whole_tensor(spec: StateSpec, local: Tensor, mesh: Mesh) -> Tensor:
    """The whole tensor of which every rank gives its `local` one: a collective of the ranks that share it."""
    axes = spec.axes(mesh)
    if spec.host:
        local = local.to(mesh.device)
    if not axes:
        return local
    parts = local
    for axis in axes:
        (parts,) = all_gather([parts[None]], axis, 0)
    whole = local.new_empty(spec.shape)
    for place in itertools.product(*(range(mesh.size(axis)) for axis in reversed(axes))):
        for piece in spec.share_at(mesh, dict(zip(reversed(axes), place, strict=True))).pieces:
            piece.of_whole(whole).copy_(piece.of(parts[place]))
    return whole


class Wholes:
    """The tensors of a state, whole, on every rank. All ranks ask for the same ones, in the same order."""

    def __init__(self, state: State, specs: Iterable[StateSpec], mesh: Mesh) -> None:
        self._state, self._specs, self._mesh = state, {spec.name: spec for spec in specs}, mesh
        self._last: State = {}

    def of(self, names: Iterable[str]) -> State:
        """These tensors. What was put together for them is kept until others are asked for: one that many parts of
        files are read from is put together once."""
        wanted = set(names)
        self._last = {name: tensor for name, tensor in self._last.items() if name in wanted}
        for name in sorted(wanted - self._last.keys()):
            self._last[name] = whole_tensor(self._specs[name], self._state[name], self._mesh)
        return dict(self._last)


@dataclass(frozen=True)
class _Initial:
    """The values that states begin with: any box of them, as a function of the place in the whole tensor."""

    specs: Mapping[str, StateSpec]
    seed: int
    device: torch.device

    def sources(self, spec: StateSpec) -> list[str]:
        """The state itself, and those that it is a copy of, directly or not."""
        found = [spec.name]
        for name in found:
            for source in (call[1] for call in self.specs[name].init if call[0] == "copy_from"):
                if source not in self.specs:
                    raise _error(self.specs[name], f"copies '{source}', which does not exist")
                if source == spec.name:
                    raise _error(spec, "copies itself")
                if self.specs[source].shape != spec.shape:
                    raise _error(spec, f"copies '{source}', whose shape is {list(self.specs[source].shape)}")
                found += [] if source in found else [source]
        return found

    def share(self, spec: StateSpec, mesh: Mesh) -> Tensor:
        """What a rank has of a tensor; its padding is 0."""
        share = spec.share(mesh)
        if len(share.pieces) == 1 and share.pieces[0].sizes == share.shape:
            return self.values(spec, share.pieces[0])
        made = torch.zeros(share.shape, dtype=spec.dtype, device=self.device)
        for piece in share.pieces:
            piece.of(made).copy_(self.values(spec, piece))
        return made

    def values(self, spec: StateSpec, piece: Piece) -> Tensor:
        """The values of a piece of the whole tensor."""
        if not spec.init:
            raise _error(spec, "has no initialiser")
        # A program for a low-precision tensor runs in f32 and is rounded once, as casting an initialised model would.
        low_precision = spec.dtype.is_floating_point and spec.dtype.itemsize < 4
        dtype = torch.float32 if low_precision else spec.dtype
        tensor = torch.empty(piece.sizes, dtype=dtype, device=self.device)
        for index, (call, *arguments) in enumerate(spec.init):
            self._replay(tensor, call, arguments, index, spec, piece)
        return tensor.to(spec.dtype)

    def _replay(
        self, tensor: Tensor, call: str, arguments: list[Any], index: int, spec: StateSpec, piece: Piece
    ) -> None:
        """Apply one recorded in-place call to `tensor`, a piece of the state."""
        if call in _DRAWS:
            key = philox.key_from(self.seed, spec.seed_name, index)
            draw = _DRAWS[call](piece.sizes, key, piece.whole, spec.shape, dtype=tensor.dtype, device=tensor.device)
            first, second = arguments  # mean and deviation, or bounds
            scale, start = (second, first) if call == "normal_" else (second - first, first)
            tensor.copy_(draw.mul_(scale).add_(start))
        elif call == "copy_":
            (values,) = arguments
            if len(values) != math.prod(spec.shape):
                raise _error(spec, f"has {len(values)} initial values for shape {list(spec.shape)}")
            tensor.copy_(piece.of_whole(torch.tensor(values, dtype=tensor.dtype).reshape(spec.shape)))
        elif call == "copy_from":
            tensor.copy_(self.values(self.specs[arguments[0]], piece))
        elif call == "seed_":
            tensor.fill_(self.seed)
        elif call == "fill_range_":
            _fill_range(tensor, piece.whole, spec.shape, *arguments)
        elif call in _PLAIN_CALLS:
            _PLAIN_CALLS[call](tensor, *arguments)
        else:
            raise _error(spec, f"is initialised by '{call}', which this runtime does not know")


def _fill_range(part: Tensor, start: Sequence[int], shape: Sequence[int], first: int, after: int, value: float) -> None:
    """Fill those elements of a box, which begins at `start` in a tensor of `shape`, whose number in it lies in
    `first` … `after`."""
    if first <= 0 and after >= math.prod(shape):
        part.fill_(value)
    elif shape:
        row = math.prod(shape[1:])
        for index in range(max(first // row, start[0]), min(-(-after // row), start[0] + part.shape[0])):
            inside = first - index * row, after - index * row
            _fill_range(part[index - start[0]], start[1:], shape[1:], *inside, value)


def _error(spec: StateSpec, problem: str) -> PackageError:
    return PackageError(f"state '{spec.name}' {problem}", where="manifest.json", hint="compile the package again")
