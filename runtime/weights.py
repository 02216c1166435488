"""Fill the parameters of a state from safetensors files.

The tensors of a file have the names and shapes that the model's library writes, which the package knows
(`weight_layout`), or those of the model's own `state_dict`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mgraph.errors import CheckpointError
from mgraph.runtime.lora import PREFIX, added_by_adapters
from mgraph.runtime.mesh import ALONE, Mesh
from mgraph.runtime.package import State, StateSpec
from mgraph.runtime.weight_files import Advance, WeightFiles, ignore, listed
from mgraph.runtime.weight_layout import FileTensor, Held, as_it_is, file_tensors


def model_tensors(specs: Iterable[StateSpec]) -> list[StateSpec]:
    """The tensors that a file of weights has: parameters and persistent buffers, but not what adapters add."""
    specs = list(specs)
    added = added_by_adapters(specs)
    return [s for s in specs if s.name not in added and (s.kind == "param" or (s.kind == "buffer" and s.persist))]


def masters(specs: Iterable[StateSpec]) -> dict[str, str]:
    """Parameters that have a copy of full precision, and its name."""
    return {s.name.removesuffix(".master"): s.name for s in specs if s.kind == "master"}


@torch.no_grad()
def load_weights(
    path: Path,
    state: State,
    specs: Iterable[StateSpec],
    layout: Iterable[Mapping[str, Any]],
    advance: Advance = ignore,
    mesh: Mesh = ALONE,
) -> int:
    """Copy every parameter and persistent buffer from the files of `path` into `state`, converting dtypes; how many
    tensors of files that were. `layout` is the package's `weight_layout`.

    A rank of a `mesh` reads no more than its shares. A master copy takes the file's own precision, not that of its
    parameter. One tensor of a file is in memory at a time; `advance` hears when it is done with. Raises CheckpointError
    for an unreadable file, and one for all tensors that are missing, of another shape, or not in the package. Two kinds
    of tensors may be there besides: buffers that the package makes itself, and copies of a parameter, under the other
    name of a tied one.
    """
    specs = list(specs)
    own = {spec.name: as_it_is(spec) for spec in model_tensors(specs)}
    full = masters(specs)
    filled = own.keys() | full.values()
    held = {s.name: Held(state[s.name], s.shape, s.share(mesh).pieces) for s in specs if s.name in filled}
    targets = {name: held[name] for name in own}, {name: held[master] for name, master in full.items()}
    laid_out = {tensor.name: tensor for tensor in file_tensors(layout, model_tensors(specs))}
    made = {s.name.rpartition(".")[2] for s in specs if s.kind == "buffer" and not s.persist}
    files = WeightFiles(path)
    _check_whole(path, files)
    found: dict[str, FileTensor] = {}
    others: list[str] = []
    misshaped: list[str] = []
    for name in files.names():
        expected = laid_out.get(name) or own.get(name)
        if expected is None:
            others.append(name)
            continue
        tensor = files.read(name)
        found[name] = expected
        if tuple(tensor.shape) == expected.shape:
            for held_alike in targets:
                expected.write(held_alike, tensor)
        else:
            misshaped.append(f"{name} is {list(tensor.shape)}, not {list(expected.shape)}")
        advance(tensor.nbytes, files.bytes)
    read = {part.state for tensor in found.values() for part in tensor.parts}
    others = [name for name in others if name.rpartition(".")[2] not in made]
    problems = {
        "missing": _missing(found, laid_out, own),
        "of another shape": misshaped,
        "not in the package": [name for name in others if not _is_copy(files.read(name), [held[n] for n in read])],
    }
    if any(problems.values()):
        raise CheckpointError(
            "the weights do not fit the package: "
            + "; ".join(f"{len(names)} {kind} ({listed(names)})" for kind, names in problems.items() if names),
            where=str(path),
            hint="compile the package from the configuration of these weights; names are those that the model's "
            "library writes, or of its state_dict",
        )
    return len(found)


def _check_whole(path: Path, files: WeightFiles) -> None:
    """Raise CheckpointError where the files hold adapters alone, in the form of PEFT."""
    names = files.names()
    if names and all(name.startswith(PREFIX) for name in names) and any(".lora_" in name for name in names):
        raise CheckpointError(
            "these are adapters, without the weights that they change",
            where=str(path),
            hint="merge them first: train.py --resume --export DIR writes weights that hold them, as does PEFT's "
            "merge_and_unload",
        )


def _missing(
    found: Mapping[str, FileTensor], laid_out: Mapping[str, FileTensor], own: Mapping[str, FileTensor]
) -> list[str]:
    """The tensors of files without which some of the state is not filled."""
    whole = {name for name, tensor in own.items() if found.get(name) is tensor}
    return [
        name
        for name, tensor in laid_out.items()
        if name not in found and not all(part.state in whole for part in tensor.parts)
    ]


def _is_copy(tensor: Tensor, held: Iterable[Held]) -> bool:
    """Whether a tensor holds what one of these has: a tied parameter may be in a file under its other names too."""
    return any(one.equals(tensor) for one in held if one.shape == tensor.shape)
