"""Finds the lines of step.py that a node became: by the function, and the origin comment above the lines."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mgraph.codegen.names import identifier
from mgraph.ir.graph import Origin

_FUNCTION = re.compile(r"def (\w+)\(")
_COMMENT = re.compile(r"\s+# (\S+)(?:  (\S+))?$")
_KERNEL = re.compile(r"\bK\.(\w+)\(")


@dataclass(frozen=True, slots=True)
class EmittedLine:
    """A line of step.py, `code` at `number`; function and origin (module path, source line) as they stand there."""

    number: int
    code: str
    function: str
    origin: tuple[str, ...]
    kernels: tuple[str, ...]

    @property
    def text(self) -> str:
        """`step.py:105  y = F.linear(x, w)`."""
        return f"step.py:{self.number}  {self.code}"

    def is_in(self, function: str) -> bool:
        """Whether it is a line of this function of the graph."""
        return self.function.rstrip("_") == identifier(function).rstrip("_")

    def is_from(self, function: str, origin: Origin) -> bool:
        """Whether it was written for a node of this function and origin."""
        place = str(origin) if origin.file else ""
        wanted = tuple(part for part in (origin.path, place) if part)
        return wanted != () and self.is_in(function) and self.origin == wanted

    def calls(self, callee: str) -> bool:
        """Whether it calls a function of the graph."""
        return re.search(rf"\b{re.escape(identifier(callee))}\(", self.code) is not None


def emitted_lines(package: Path) -> list[EmittedLine]:
    """The statements of a package's step.py; none where the file is gone."""
    file = package / "step.py"
    if not file.is_file():
        return []
    found: list[EmittedLine] = []
    function, origin = "", tuple[str, ...]()
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if start := _FUNCTION.match(line):
            function, origin = start[1], ()
        elif comment := _COMMENT.match(line):
            origin = tuple(part for part in comment.groups() if part)
        elif function and line.strip() and not line.strip().startswith("del "):
            found.append(EmittedLine(number, line.strip(), function, origin, tuple(_KERNEL.findall(line))))
    return found


def ranges(numbers: Iterable[int]) -> str:
    """Line numbers, in order, as `105-107, 112`."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = runs[-1][0], number
        else:
            runs.append((number, number))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
