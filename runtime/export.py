"""Write the weights of a run as other libraries read them: safetensors files, and the model's config.json.

Names and shapes are those that the model's library writes, which the package knows (`weight_layout`), a tied parameter
stands once, and the metadata is what `transformers` expects. A directory with the final name is whole: it is written
beside it under another name, and renamed.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mgraph.adapters import adapter_names
from mgraph.errors import OptionError, StorageError, storage_hint
from mgraph.runtime.lora import merged
from mgraph.runtime.mesh import ALONE, Mesh
from mgraph.runtime.package import State, StateSpec
from mgraph.runtime.state import Wholes
from mgraph.runtime.weight_files import INDEX, Advance, ignore, write_file
from mgraph.runtime.weight_layout import FileTensor, file_tensors
from mgraph.runtime.weights import masters, model_tensors

CONFIG = "config.json"
"""The file of a package, and of an export, that holds the configuration of a `transformers` model."""

SHARD_BYTES = 5 * 10**9
"""How large a file may become before the next one is begun."""

_REPLACED = ("dtype", "torch_dtype", "quantization_config")
"""What a configuration says of the numbers in the files that it came with."""


def check_export(target: Path, flag: str = "--export") -> None:
    """Raise OptionError where an export, asked for by `flag`, would write over something, or has no place to be in."""
    place = next(p for p in target.absolute().parents if os.path.exists(p))  # of a path it may not search: False
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise OptionError(f"{flag} {target}: {place} is no directory that can be written to", hint="give another place")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise OptionError(f"{flag} {target}: there is something already", hint="give a directory that is new or empty")


@contextmanager
def new_directory(target: Path, flag: str = "--export") -> Iterator[Path]:
    """A directory to write into, which becomes `target` when all is written, or vanishes.

    Raises OptionError where `target` holds something, StorageError where it cannot be written.
    """
    check_export(target, flag)
    target = target.absolute()
    temporary: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        temporary.chmod(0o755)  # temporary directories are private; weights need not be
        yield temporary
        temporary.rename(target)
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(
            f"the weights could not be written: {reason}", where=str(target), hint=f"{storage_hint(error)} {flag}"
        ) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


class Weights:
    """The weights of a state as they are to lie in files, adapters merged; with `full`, a parameter's copy of full
    precision, or the parameter in float32. Ranks that hold shares of them put each together as its turn comes."""

    def __init__(
        self,
        state: State,
        specs: Iterable[StateSpec],
        layout: Iterable[Mapping[str, Any]],
        *,
        full: bool = False,
        mesh: Mesh = ALONE,
    ) -> None:
        specs = list(specs)
        written = model_tensors(specs)
        copies = masters(specs) if full else {}
        self.mesh = mesh
        self._wholes = Wholes(state, specs, mesh)
        self.adapters = {spec.name: spec.adapter for spec in specs if spec.adapter is not None}
        self.names = {spec.name: copies.get(spec.name, spec.name) for spec in specs}
        self.dtypes = {s.name: torch.float32 if full and s.kind == "param" else s.dtype for s in written}
        self.tensors = file_tensors(layout, written)

    def dtype(self, tensor: FileTensor) -> torch.dtype:
        """That of a tensor in its file."""
        return self.dtypes[tensor.parts[0].state]

    def bytes(self, tensors: Iterable[FileTensor]) -> int:
        """Size of tensors in files."""
        return sum(tensor.numel * self.dtype(tensor).itemsize for tensor in tensors)

    def values(self, tensors: Iterable[FileTensor]) -> Iterator[Tensor]:
        """The tensors, on the first rank alone, contiguous on the CPU; no copies where the state has them so. Every
        rank must take all of them."""
        for tensor in tensors:
            adapted = {part.state for part in tensor.parts} & self.adapters.keys()
            needed = {part.state for part in tensor.parts}.union(*map(adapter_names, adapted))
            state = self._wholes.of(self.names[name] for name in needed)
            if self.mesh.is_first:
                joint = {self.names[name]: self._merged(name, state) for name in adapted}
                yield tensor.read({**state, **joint}, self.names, self.dtype(tensor))

    def _merged(self, name: str, state: State) -> Tensor:
        """A weight with its adapter, f32."""
        base, a, b = (state[self.names[n]].detach() for n in (name, *adapter_names(name)))
        return merged(base, a, b, self.adapters[name])

    def most(self) -> str:
        """The dtype that most of the weights have, as torch names it: `float32`, `bfloat16`."""
        sizes: dict[torch.dtype, int] = {}
        for tensor in self.tensors:
            dtype = self.dtype(tensor)
            sizes[dtype] = sizes.get(dtype, 0) + self.bytes([tensor])
        return str(max(sizes, key=lambda dtype: sizes[dtype])).removeprefix("torch.")

    def shards(self, limit: int) -> list[list[FileTensor]]:
        """The tensors in their order, cut where a file would become too large; a single tensor is never cut."""
        shards: list[list[FileTensor]] = [[]]
        size = 0
        for tensor in self.tensors:
            own = self.bytes([tensor])
            if shards[-1] and size + own > limit:
                shards.append([])
                size = 0
            shards[-1].append(tensor)
            size += own
        # Wide dtypes first: a tensor that is read through a mapping must begin at a multiple of its element.
        return [sorted(shard, key=lambda tensor: -self.dtype(tensor).itemsize) for shard in shards]


@torch.no_grad()
def export_weights(
    target: Path,
    weights: Weights,
    config: Path,
    shard_bytes: int = SHARD_BYTES,
    advance: Advance = ignore,
    beside: Mapping[str, Path] | None = None,
) -> None:
    """Write the parameters and persistent buffers to the directory `target`; with `config`, where that file exists, and
    copies of the files `beside`, by the names that they get.

    All ranks of the weights' mesh call it, and the first one writes. The configuration is written with the dtype that
    the files have. One tensor is put together and copied at a time, if at all; `advance` hears of each. Raises, on the
    first rank, OptionError where `target` holds something, StorageError where it cannot be written; nothing
    half-written stays behind.
    """
    shards = weights.shards(shard_bytes)
    values = weights.values(itertools.chain.from_iterable(shards))
    try:
        if weights.mesh.is_first:
            with new_directory(target) as directory:
                _write_shards(directory, weights, shards, values, advance)
                if config.is_file():
                    settings = json.loads(config.read_text(encoding="utf-8"))
                    settings = {key: value for key, value in settings.items() if key not in _REPLACED}
                    settings["dtype"] = weights.most()
                    (directory / CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
                for name, file in (beside or {}).items():
                    shutil.copyfile(file, directory / name)
    finally:
        if weights.mesh.world_size > 1:  # whatever has become of the files, the others put all tensors together
            for _ in values:
                pass


def _write_shards(
    directory: Path, weights: Weights, shards: list[list[FileTensor]], values: Iterator[Tensor], advance: Advance
) -> None:
    single = len(shards) == 1
    weight_map: dict[str, str] = {}
    total = 0
    for index, shard in enumerate(shards, 1):
        file = "model.safetensors" if single else f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        total += write_file(
            directory / file,
            {tensor.name: (weights.dtype(tensor), tensor.shape) for tensor in shard},
            _told(weights, shard, values, advance),
        )
        weight_map |= {tensor.name: file for tensor in shard}
    if not single:
        index_text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
        (directory / INDEX).write_text(index_text + "\n", encoding="utf-8")


def _told(weights: Weights, shard: list[FileTensor], values: Iterator[Tensor], advance: Advance) -> Iterator[Tensor]:
    """The values of the tensors of one file; `advance` hears of each when it is written."""
    total = weights.bytes(weights.tensors)
    for tensor in shard:
        yield next(values)
        advance(weights.bytes([tensor]), total)
