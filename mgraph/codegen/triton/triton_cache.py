"""What comes out of Triton's cache, checked: a whole binary and its launch ABI, or one more compilation, or an error.

Triton keeps what it compiles under `TRITON_CACHE_DIR` (`~/.triton/cache`), an entry for each hash of source, compiler
and options. Files are written under a temporary name and renamed, so that compilers may share the directory; but what
is read is taken as it is. A file that was cut short (a full disk, a copy that was interrupted) would go into a package,
so every binary is looked at here, and an entry that is damaged is compiled again, over it.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgraph.errors import MgraphError, StorageError

_HEADER = struct.Struct("<32xQQ6xHHHH2x")
"""Of a 64-bit ELF file the offsets of program and section headers; size and number of the one, and of the other."""
_SECTION = struct.Struct("<4xI16xQQ24x")
"""Of a section header the type, and offset and size of what it describes."""
_NO_BITS = 8
"""The type of sections that take no room in the file."""


@dataclass(frozen=True)
class PtxAbi:
    """What the PTX text of one kernel says about its launch."""

    symbol: str
    arch: str
    cuda: int
    threads: int
    num_parameters: int


def read_ptx(text: str) -> PtxAbi:
    """Read the entry point, target, version and parameters of a PTX module with one kernel.

    Each major version of PTX belongs to one of CUDA, four higher: PTX 8 came with CUDA 12. A driver runs binaries of
    its own and of earlier major versions. Raises ValueError for a text without one of them.
    """

    def find(pattern: str, what: str) -> str:
        match: re.Match[str] | None = re.search(pattern, text, re.MULTILINE | re.DOTALL)
        if match is None:
            raise ValueError(f"its ptx has no {what}")
        return match[1]

    return PtxAbi(
        symbol=find(r"\.entry\s+(\w+)\s*\(", "entry"),
        arch=find(r"^\.target\s+(\w+)", "target"),
        cuda=int(find(r"^\.version\s+(\d+)\.", "version")) + 4,
        threads=int(find(r"\.reqntid\s+(\d+)", "number of threads")),
        num_parameters=find(r"\.entry\s+\w+\s*\((.*?)\)", "parameters").count(".param"),
    )


def check_elf(data: bytes) -> None:
    """Raise ValueError, saying why, unless `data` is an ELF file that holds its headers and all that sections name."""
    if data[:5] != b"\x7fELF\x02" or len(data) < _HEADER.size:
        raise ValueError(f"its cubin of {len(data)} bytes is no 64-bit ELF file")
    programs, start, program_size, program_count, size, count = _HEADER.unpack_from(data)
    ends = [start + size * count, programs + program_size * program_count]
    if ends[0] <= len(data) and size == _SECTION.size:
        sections = (_SECTION.unpack_from(data, start + size * index) for index in range(count))
        ends += [offset + extent for kind, offset, extent in sections if kind != _NO_BITS]
    if not count or size != _SECTION.size or max(ends) > len(data):
        raise ValueError(f"its cubin is cut short: {len(data)} bytes, of at least {max(ends)}")


_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, StopIteration)
"""What Triton raises, or we do, where an entry is not what was written."""


def compile_whole(compile: Callable[[], Any], function: str) -> tuple[Any, PtxAbi]:
    """What `compile`, a call of `triton.compile` for the kernel `function`, gives, and what its PTX says.

    Raises MgraphError where it is damaged even after it was compiled anew, StorageError where Triton cannot write.
    """
    import triton

    try:
        try:
            return _checked(compile(), function)
        except (*_DAMAGE, FileNotFoundError):
            # Of the cache, by assumption: compiled anew, which writes over the entry.
            _drop_damaged_lists(Path(triton.knobs.cache.dir), function)
            with triton.knobs.compilation.scope():
                triton.knobs.compilation.always_compile = True
                return _checked(compile(), function)
    except _DAMAGE as damage:
        raise MgraphError(
            f"Triton's binary of kernel {function} is damaged, also when it is compiled anew: {damage}",
            where=str(triton.knobs.cache.dir),
            hint="remove that directory, or set TRITON_CACHE_DIR to another on a disk that works",
        ) from None
    except OSError as error:
        raise _unwritable(error, Path(triton.knobs.cache.dir)) from error


def _drop_damaged_lists(cache: Path, function: str) -> None:
    """Remove lists of the files of an entry that are none: Triton reads them also when it is to compile anew."""
    for file in cache.glob(f"*/__grp__{function}.json"):
        try:
            whole = isinstance(json.loads(file.read_text(encoding="utf-8")), dict)
        except (OSError, ValueError):
            whole = False
        if not whole:
            file.unlink(missing_ok=True)


def _checked(compiled: Any, function: str) -> tuple[Any, PtxAbi]:
    """A compiled kernel that is whole, and its ABI. Raises ValueError otherwise."""
    for kind in ("ptx", "cubin"):
        if kind not in compiled.asm:
            raise ValueError(f"it has no {kind}")
    abi = read_ptx(compiled.asm["ptx"])
    if abi.symbol != function:
        raise ValueError(f"its ptx is of {abi.symbol}")
    check_elf(compiled.asm["cubin"])
    return compiled, abi


def _unwritable(error: OSError, cache: Path) -> StorageError:
    """What to tell of a file that Triton cannot write or read: one of its cache, or a temporary one."""
    file = Path(error.filename) if isinstance(error.filename, str) else cache
    variable = "TRITON_CACHE_DIR" if file.is_relative_to(cache) else "TMPDIR"
    return StorageError(
        f"Triton cannot keep what it compiles: {error.strerror or error}",
        where=str(file),
        hint=f"free some space, or set {variable} to a directory that can be written",
    )
