"""Fill the parameters of a state from a file: safetensors, by parameter name.

Names are those of the model's own `state_dict`, so a file that the model's library wrote fits. Tied parameters may be
stored once, under any of their names.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from mgraph.errors import CheckpointError
from mgraph.runtime.package import State, StateSpec


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a path: itself, or all in a directory. Raises CheckpointError where there are none."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not all(f.is_file() for f in files):
        raise CheckpointError(f"no weights at {path}", hint="give a .safetensors file or a directory that holds some")
    return files


@torch.no_grad()
def load_weights(path: Path, state: State, specs: Iterable[StateSpec]) -> None:
    """Copy every parameter and persistent buffer from the files of `path` into `state`, converting dtypes.

    Raises CheckpointError for an unreadable file, a missing tensor or one of another shape; others are ignored.
    """
    from safetensors import SafetensorError, safe_open

    missing = {s.name: s for s in specs if s.kind == "param" or (s.kind == "buffer" and s.persist)}
    for file in weight_files(path):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys() & missing.keys():
                    tensor, target = opened.get_tensor(name), state[name]
                    if tensor.shape != target.shape:
                        raise CheckpointError(
                            f"{name} is {list(tensor.shape)} in the file and {list(target.shape)} in the package",
                            where=str(file),
                            hint="compile the package from the configuration of these weights",
                        )
                    target.copy_(tensor)
                    del missing[name]
        except SafetensorError as error:
            raise CheckpointError(f"not a whole safetensors file: {error}", where=str(file)) from error
    if missing:
        first = ", ".join(list(missing)[:3])
        raise CheckpointError(
            f"{len(missing)} tensors of the package are not in the weights, first {first}",
            where=str(path),
            hint="the names must be those of the model's state_dict",
        )
