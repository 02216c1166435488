"""Files of weights: finding them, reading and writing their tensors one at a time.

The format is safetensors: the length of a header as 8 bytes, little-endian; the header, JSON, which has dtype, shape
and place of each tensor; the tensors. Reading maps a file, and the pages that were read count as memory until it is
unmapped, which is done after every `MAPPED` bytes. Writing is done here, since the library's writer takes all tensors
of a file at once, and those that lie otherwise in the state would all have to be copied first.

Where experts are stored in four bits (MXFP4: `NAME_blocks` u8[..., G, 16] with two numbers a byte, low half first, and
`NAME_scales` u8[..., G], a power of two for each 32 of them, less 127), the files appear to hold `NAME` in bfloat16,
which all these numbers fit in, with the last two of its dims exchanged, as the modules have it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mgraph.errors import CheckpointError
from mgraph.runtime.checkpoint import RUN_FILE

INDEX = "model.safetensors.index.json"
"""Which file has which tensor, where there are several."""

SUFFIX = ".safetensors"
MAPPED = 256 * 2**20
"""Bytes that are read of a file before its pages are given back."""

SHOWN = 3
"""How many names of each kind of problem an error shows."""

Advance = Callable[[int, int], object]
"""Hears how many bytes were read or written just now, and how many there are in all."""

_OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".gguf")
_BLOCKS, _SCALES = "_blocks", "_scales"
_FOUR_BITS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of the low three bits (two of exponent, one of mantissa); the fourth is the sign."""

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def ignore(done: int, total: int) -> None:
    """An `Advance` for whom it does not matter."""


class WeightFiles:
    """The safetensors files of a path: itself, those of its index, or all in the directory. `bytes` is their size.

    Raises CheckpointError where there are none, where one is absent, cut off, or lacks what the index says it has, and
    where two files have a tensor and no index says which counts.
    """

    def __init__(self, path: Path) -> None:
        index = _read_index(path / INDEX)
        self.stored: dict[str, Path] = {}
        for file in _files(path, None if index is None else set(index.values())):
            for name in _names(file):
                if index is not None and index.get(name, file.name) != file.name:
                    continue  # that of another file counts
                other = self.stored.setdefault(name, file)
                if other != file:
                    raise CheckpointError(
                        f"two files have the tensor '{name}': {other.name} and {file.name}",
                        where=str(path),
                        hint="give the one file that is meant, or move the other out of the directory",
                    )
        lacking = [n for n, file in (index or {}).items() if self.stored.get(n, Path()).name != file]
        if index is not None and lacking:
            raise CheckpointError(
                f"the index names tensors that the files do not have: {listed(lacking)}",
                where=str(path / INDEX),
                hint="the files and the index are of different checkpoints, or a download was cut off",
            )
        self.bytes = sum(file.stat().st_size for file in set(self.stored.values()))
        packed = {n.removesuffix(_BLOCKS) for n in self.stored if n.endswith(_BLOCKS)}
        self._packed = {n for n in packed if n + _SCALES in self.stored}
        self._opened: tuple[Path, Any, int] | None = None

    def names(self) -> list[str]:
        """Names of all tensors, those of one file after another."""
        taken = {name + suffix for name in self._packed for suffix in (_BLOCKS, _SCALES)}
        return [name for name in self.stored if name not in taken] + sorted(self._packed)

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU. It is good until the next one is read, and mapped memory: not to be written to."""
        if name in self._packed:
            blocks, scales = self._read(name + _BLOCKS).clone(), self._read(name + _SCALES)
            if blocks.ndim != 4 or blocks.shape != (*scales.shape, 16) or blocks.dtype != torch.uint8:
                raise CheckpointError(
                    f"'{name}' is not in four bits as it should be: blocks {list(blocks.shape)}, scales "
                    f"{list(scales.shape)}",
                    where=str(self.stored[name + _BLOCKS]),
                    hint="convert the weights to bfloat16",
                )
            return _unpacked(blocks, scales)
        return self._read(name)

    def _read(self, name: str) -> Tensor:
        from safetensors import safe_open

        file = self.stored[name]
        opened = self._opened
        if opened is None or opened[0] != file or opened[2] > MAPPED:
            self._opened = opened = None  # the pages of a mapping stay in memory until it is dropped
            opened = (file, safe_open(file, framework="pt"), 0)
        tensor: Tensor = opened[1].get_tensor(name)
        self._opened = (file, opened[1], opened[2] + tensor.nbytes)
        return tensor


def _read_index(file: Path) -> dict[str, str] | None:
    """The file of each tensor; None where there is no index."""
    if not file.is_file():
        return None
    try:
        weight_map = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(value) for name, value in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = str(error) if isinstance(error, ValueError) else "it maps no names of tensors to files (weight_map)"
        hint = "copy it again, or remove it: all files beside it are read then"
        raise CheckpointError(f"not an index of weights: {reason}", where=str(file), hint=hint) from error


def _files(path: Path, indexed: set[str] | None) -> list[Path]:
    if indexed is not None:
        files = sorted(path / name for name in indexed)
    else:
        files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
    others = [p.name for p in (path.iterdir() if path.is_dir() else files) if p.suffix in _OTHER_FORMATS]
    if path.is_file() and path.suffix not in (SUFFIX, *_OTHER_FORMATS):
        raise CheckpointError(
            f"{path} is no file of weights: only {SUFFIX} files are read",
            hint=f"give a {SUFFIX} file, or the directory that holds some",
        )
    if others and (not files or not path.is_dir()):
        raise CheckpointError(
            f"{listed(sorted(others))} at {path}: weights are read from safetensors files alone",
            hint="convert them: in transformers, from_pretrained and then save_pretrained writes safetensors",
        )
    absent = [f.name for f in files if not f.is_file()]
    if not files or absent:
        problem = f", {listed(absent)} is absent" if absent and path.is_dir() else ""
        hint = f"give a {SUFFIX} file or a directory that holds some"
        if (path / RUN_FILE).is_file():
            run = path.parent.parent if path.parent.name == "checkpoints" else path.parent
            hint = f"this is a checkpoint of a training run: give the run, {run}, whose newest one is served"
        raise CheckpointError(f"no weights at {path}{problem}", hint=hint)
    return files


def _names(file: Path) -> list[str]:
    from safetensors import SafetensorError, safe_open

    try:
        file.open("rb").close()  # safetensors calls every file that it cannot open absent
    except OSError as error:
        raise CheckpointError(
            f"weights cannot be read: {error.strerror}", where=str(file), hint="give a file that may be read"
        ) from error
    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.offset_keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"not a whole safetensors file: {error}", where=str(file), hint="download or write the file again"
        ) from error


def _unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """MXFP4: blocks u8[E, F, G, 16], scales u8[E, F, G] -> bf16[E, G * 32, F]."""
    numbers = torch.tensor([*_FOUR_BITS, *(-number for number in _FOUR_BITS)], dtype=torch.bfloat16)
    experts, outputs, groups, _ = blocks.shape
    made = torch.empty(experts, groups * 32, outputs, dtype=torch.bfloat16)
    for weight, halves, exponents in zip(made, blocks, scales, strict=True):  # one at a time: indices take much memory
        part = weight.t().unflatten(-1, (groups, 16, 2))
        part[..., 0] = numbers[(halves & 15).int()]
        part[..., 1] = numbers[(halves >> 4).int()]
        part *= torch.ldexp(torch.ones(exponents.shape), exponents.int() - 127)[..., None, None]
    return made


def write_file(file: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], values: Iterable[Tensor]) -> int:
    """Write a safetensors file of tensors of these dtypes and shapes; `values` gives them in this order, contiguous on
    the CPU, each when it is to be written. The number of bytes of the tensors. Raises OSError.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + dtype.itemsize * torch.Size(shape).numel()
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8 bytes
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for value in values:
            stream.write(value.reshape(-1).view(torch.uint8).numpy().data)
        assert stream.tell() == 8 + len(text) + end, f"{file} is not as long as its header says"
    return end


def listed(names: list[str]) -> str:
    """The first few of the names."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
