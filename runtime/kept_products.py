"""Which kernels tuned products took, kept beside a package, so that later runs begin at once and choose alike.

`products.json` of a package has for each machine (its GPU, and cuBLASLt's version, whose lists of kernels may differ)
the number of the kernel that a product of a shape took, null where torch's own was as fast, by what `_text` writes of
the shape:

    {"NVIDIA H200, cuBLASLt 130100": {"16384x2048 @ 2048x5632, rows 2048, columns 2048, bfloat16": 23, ...}}
"""

from __future__ import annotations

import functools
import json
import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from mgraph.errors import PackageError
from mgraph.runtime import cublas_lt
from mgraph.runtime.cublas_lt import Shape

FILE = "products.json"
Choices = dict[str, dict[str, int | None]]
"""By machine and shape."""


class KeptProducts:
    """The choices of a package; those that are made are written by the first process alone.

    Raises PackageError where the file is none of these.
    """

    def __init__(self, package: Path, machine: Callable[[], str] | None = None) -> None:
        self._file, self._machine = package / FILE, machine or this_machine
        self._all = _read(self._file)
        self._changed = False
        self._writes = os.environ.get("RANK", "0") == "0"

    def of(self, shape: Shape, summed: bool) -> tuple[bool, int | None]:
        """Whether there is a choice for a shape, of a product that is added to a total or not, and which."""
        known = self._all.get(self._machine(), {})
        text = _text(shape, summed)
        return text in known, known.get(text)

    def keep(self, shape: Shape, summed: bool, index: int | None) -> None:
        """Note a choice, until `write`."""
        self._all.setdefault(self._machine(), {})[_text(shape, summed)] = index
        self._changed = True

    def write(self) -> None:
        """Write what was noted since, with what others have written; nowhere if there is no place for it: the choices
        are then made again by the next run."""
        if not (self._changed and self._writes):
            return
        self._changed = False
        unfinished = self._file.with_suffix(f".{uuid.uuid4().hex}")
        try:
            for machine, choices in (_choices_of(self._file) or {}).items():
                self._all[machine] = choices | self._all.get(machine, {})
            unfinished.write_text(json.dumps(self._all, indent=1, sort_keys=True) + "\n", encoding="utf-8")
            os.replace(unfinished, self._file)
        except OSError:
            self._writes = False
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)


@functools.cache
def this_machine() -> str:
    """The GPU and the library that kernels are numbered by."""
    return f"{torch.cuda.get_device_name()}, cuBLASLt {cublas_lt.version()}"


def _read(file: Path) -> Choices:
    """What was kept. Raises PackageError where the file is damaged."""
    found = _choices_of(file) if file.is_file() else {}
    if found is None:
        what = "the choices of --tune-products cannot be read"
        raise PackageError(what, str(file), "delete the file: the next run makes them again")
    return found


def _choices_of(file: Path) -> Choices | None:
    """What a file has; None where it cannot be read, or is none of these."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    right = isinstance(found, dict) and all(_is_choices(choices) for choices in found.values())
    return found if right else None


def _is_choices(choices: object) -> bool:
    return isinstance(choices, dict) and all(
        index is None or (isinstance(index, int) and not isinstance(index, bool) and index >= 0)
        for index in choices.values()
    )


def _text(shape: Shape, summed: bool) -> str:
    left, right = (f"{'columns' if lie.turned else 'rows'} {lie.stride}" for lie in (shape.left, shape.right))
    sizes = f"{shape.rows}x{shape.depth} @ {shape.depth}x{shape.columns}"
    return f"{sizes}, {left}, {right}, {str(shape.dtype).removeprefix('torch.')}" + ", to a total" * summed
