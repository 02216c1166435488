"""Which line of the user's program something comes from: the last frame outside torch."""

from __future__ import annotations

import functools
import os
import re
import site
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).resolve().parent)
_STACK_LINE = re.compile(r'^\s*File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Frame:
    """A source line: `file` relative to the working directory or to its package's root, and its text if known."""

    file: str
    line: int
    text: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f": {self.text}" if self.text else "")


def _is_library(file: str) -> bool:
    return file.startswith((_TORCH, "<")) or "importlib" in file or file.endswith(("contextlib.py", "functools.py"))


def user_frame(frames: Iterable[traceback.FrameSummary]) -> Frame | None:
    """The last frame that lies neither in torch nor in this package, `None` if there is none."""
    found = None
    for frame in frames:
        if not _is_library(frame.filename) and not os.path.realpath(frame.filename).startswith(_OURS):
            found = frame
    return Frame(relative(found.filename), found.lineno or 0, found.line or "") if found else None


def error_frame(error: BaseException) -> Frame | None:
    """The user's line that an exception passed through last."""
    return user_frame(traceback.extract_tb(error.__traceback__))


@functools.lru_cache(maxsize=65536)
def stack_frame(stack: str) -> Frame | None:
    """The last frame outside torch of a stack as torch.fx records it (text, outermost first)."""
    found = None
    for match in _STACK_LINE.finditer(stack):
        if not _is_library(match["file"]):
            found = match
    return Frame(relative(found["file"]), int(found["line"])) if found else None


def _roots() -> Iterator[Path]:
    yield Path.cwd()
    for root in (*site.getsitepackages(), site.getusersitepackages(), str(Path(_OURS).parents[1])):
        yield Path(root).resolve()


@functools.lru_cache(maxsize=4096)
def relative(file: str) -> str:
    """A path that means the same on another machine: below the working directory, or below a package root."""
    path = Path(file).resolve()  # a file reached through a link is known by its own place
    nested = [path.relative_to(root).as_posix() for root in _roots() if path.is_relative_to(root)]
    return min(nested, key=len) if nested else path.as_posix()
