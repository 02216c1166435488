"""Finds the lines of step.py that a node became: by the function, and the origin comment above the lines."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from mgraph.codegen.names import identifier
from mgraph.ir.graph import Origin

_FUNCTION = re.compile(r"def (\w+)\(")
_COMMENT = re.compile(r"\s+# (\S+)(?:  (\S+))?$")
_KERNEL = re.compile(r"\bK\.(\w+)\(")


@dataclass(frozen=True, slots=True)
class EmittedLine:
    """A line of step.py: `text` is `step.py:105  y = F.linear(x, w)`; function and origin as they stand there."""

    text: str
    function: str
    origin: tuple[str, ...]
    kernels: tuple[str, ...]

    def is_from(self, function: str, origin: Origin) -> bool:
        """Whether it was written for a node of this function and origin."""
        place = str(origin) if origin.file else ""
        wanted = tuple(part for part in (origin.path, place) if part)
        return wanted != () and self.function.rstrip("_") == identifier(function).rstrip("_") and self.origin == wanted


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
            found.append(
                EmittedLine(f"step.py:{number}  {line.strip()}", function, origin, tuple(_KERNEL.findall(line)))
            )
    return found
