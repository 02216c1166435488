"""Fill the parameters of a state from safetensors files, by parameter name.

Names are those of the model's own `state_dict`, so a file that the model's library wrote fits. A directory may hold one
file or several; where it has an index, the index says which file has which tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from mgraph.errors import CheckpointError
from mgraph.runtime.package import State, StateSpec

INDEX = "model.safetensors.index.json"
SHOWN = 3
"""How many names of each kind of problem an error shows."""


def model_tensors(specs: Iterable[StateSpec]) -> list[StateSpec]:
    """The tensors that a file of weights has: parameters and persistent buffers."""
    return [s for s in specs if s.kind == "param" or (s.kind == "buffer" and s.persist)]


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a path: itself, those of its index, or all in the directory.

    Raises CheckpointError where there are none, or where one that the index names is absent.
    """
    index = path / INDEX
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"not an index of weights: {error!r}", where=str(index)) from error
        files = sorted(path / name for name in names)
    else:
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    absent = [f.name for f in files if not f.is_file()]
    if not files or absent:
        problem = f", {', '.join(absent[:SHOWN])} is absent" if absent and path.is_dir() else ""
        raise CheckpointError(
            f"no weights at {path}{problem}", hint="give a .safetensors file or a directory that holds some"
        )
    return files


@torch.no_grad()
def load_weights(path: Path, state: State, specs: Iterable[StateSpec]) -> None:
    """Copy every parameter and persistent buffer from the files of `path` into `state`, converting dtypes.

    A master copy takes the file's own precision, not that of its parameter. Raises CheckpointError for an unreadable
    file, and one for all tensors that are missing, of another shape, or not in the package. Two kinds of tensors may be
    there besides: buffers that the package makes itself, and copies of a parameter, under the other name of a tied one.
    """
    specs = list(specs)
    wanted = {s.name for s in model_tensors(specs)}
    derived = {s.name for s in specs if s.kind == "buffer"} - wanted
    masters = {s.name.removesuffix(".master"): s.name for s in specs if s.kind == "master"}
    found: set[str] = set()
    others: list[tuple[Path, str]] = []
    misshaped: list[str] = []
    for file in weight_files(path):
        for name in _names(file):
            if name not in wanted:
                others.append((file, name))
                continue
            found.add(name)
            tensor = _read(file, name)
            if tensor.shape != state[name].shape:
                misshaped.append(f"{name} is {list(tensor.shape)}, not {list(state[name].shape)}")
                continue
            for target in (name, masters.get(name)):
                if target is not None:
                    state[target].copy_(tensor)
    problems = {
        "missing": sorted(wanted - found),
        "of another shape": misshaped,
        "not in the package": [n for f, n in others if n not in derived and not _is_copy(_read(f, n), state, found)],
    }
    if any(problems.values()):
        raise CheckpointError(
            "the weights do not fit the package: " + "; ".join(_listed(k, v) for k, v in problems.items() if v),
            where=str(path),
            hint="compile the package from the configuration of these weights; names are those of its state_dict",
        )


def _names(file: Path) -> list[str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            return sorted(opened.keys())
    except SafetensorError as error:
        raise CheckpointError(f"not a whole safetensors file: {error}", where=str(file)) from error


def _read(file: Path, name: str) -> Tensor:
    """One tensor. The file is mapped anew for each, since the pages of a mapping stay in memory until it is dropped."""
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        tensor: Tensor = opened.get_tensor(name)
    return tensor


def _is_copy(tensor: Tensor, state: State, names: Iterable[str]) -> bool:
    """Whether a tensor holds what one of these has: a tied parameter may be in a file under its other names too."""
    alike = (state[name] for name in names if state[name].shape == tensor.shape)
    return any(torch.equal(tensor.to(own), own) for own in alike)


def _listed(problem: str, names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{len(names)} {problem} ({', '.join(names[:SHOWN])}{more})"
