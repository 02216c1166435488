"""Lists of state names in emitted code: constants at the top of step.py, repeated layers folded into one line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mgraph.codegen.source import SourceWriter

SHORT = 3
"""Lists up to this length are written out where they are used."""

_GRADIENT = ".grad"

LAYER = "LAYER_PARAMETERS"
"""The name of a table for the states of one layer."""

_LAYER = re.compile(r"^(.*?\.)(\d+)(\..*)$")


class StateTables:
    """Constants that hold state names. A list equal to a known one up to one ending reuses it."""

    def __init__(self) -> None:
        self.tables: dict[str, tuple[str, ...]] = {}

    def add(self, hint: str, names: Sequence[str]) -> str:
        """The constant that holds exactly these names."""
        for known, held in self.tables.items():
            if held == tuple(names):
                return known
        name, number = hint, 1
        while name in self.tables:
            number += 1
            name = f"{hint}_{number}"
        self.tables[name] = tuple(names)
        return name

    def of_layer(self, templates: Sequence[str], number: str, hint: str = LAYER) -> str:
        """The text of the list of the tensors of one layer, by templates of their names, and the text of its number."""
        whole = [table for table, held in self.tables.items() if len(held) == len(templates)]
        table = next((t for t in whole if self._match(templates, 0, self.tables[t]) is not None), None)
        if table is None:
            are_gradients = all(t.endswith(_GRADIENT) for t in templates)
            table = self.add(hint, [t.removesuffix(_GRADIENT) if are_gradients else t for t in templates])
        key = f"name.format({number})"
        ending = self._match(templates, 0, self.tables[table])
        if ending:
            key = f'f"{{{key}}}{ending}"'
        return f"[state[{key}] for name in {table}]"

    def tensors(self, names: Sequence[str], hint: str) -> str:
        """The text of the list of these states' tensors."""
        layers = [_LAYER.match(name) for name in names]
        first = layers[0]
        if first and all(m and m.groups()[:2] == first.groups()[:2] for m in layers):
            return self.of_layer([f"{m[1]}{{}}{m[3]}" for m in layers if m], first[2])
        if hint and len(names) > SHORT and not any(self._match(names, 0, held) for held in self.tables.values()):
            self.add(hint, names)
        parts: list[str] = []
        position = 0
        while position < len(names):
            found = self._longest(names, position)
            if found is None:
                parts.append(f'state["{names[position]}"]')
                position += 1
                continue
            table, ending = found
            key = f'f"{{name}}{ending}"' if ending else "name"
            parts.append(f"*[state[{key}] for name in {table}]")
            position += len(self.tables[table])
        alone = len(parts) == 1 and parts[0].startswith("*")
        return parts[0][1:] if alone else f"[{', '.join(parts)}]"

    def write(self, writer: SourceWriter) -> None:
        """Write all constants."""
        for name, names in self.tables.items():
            writer.line(f"{name} = [")
            with writer.indented():
                for element in folded(names):
                    element.write(writer)
            writer.line("]")

    def _longest(self, names: Sequence[str], position: int) -> tuple[str, str] | None:
        best: tuple[str, str] | None = None
        for table, held in self.tables.items():
            ending = self._match(names, position, held)
            if ending is not None and (best is None or len(held) > len(self.tables[best[0]])):
                best = table, ending
        return best

    @staticmethod
    def _match(names: Sequence[str], position: int, held: tuple[str, ...]) -> str | None:
        """The ending that turns the held names into those at the position, or None."""
        part = names[position : position + len(held)]
        if len(part) < len(held) or not part[0].startswith(held[0]):
            return None
        ending = part[0][len(held[0]) :]
        return ending if all(p == h + ending for p, h in zip(part, held, strict=True)) else None


@dataclass(frozen=True, slots=True)
class Element:
    """One element of a list of names: a name, or the names of consecutive layers (`ends` not empty)."""

    prefix: str
    layers: range = range(0)
    ends: tuple[str, ...] = ()

    def write(self, writer: SourceWriter) -> None:
        """As a line of a list literal, or several for many ends."""
        numbers = (
            f"range({self.layers.stop})" if self.layers.start == 0 else f"range{self.layers.start, self.layers.stop}"
        )
        # A name may be a template itself, whose braces are none of the f-string's.
        prefix, *ends = (part.replace("{", "{{").replace("}", "}}") for part in (self.prefix, *self.ends))
        if not self.ends:
            writer.line(f'"{self.prefix}",')
        elif len(self.ends) == 1:
            writer.line(f'*[f"{prefix}{{i}}{ends[0]}" for i in {numbers}],')
        else:
            writer.line("*[")
            with writer.indented():
                writer.line(f'f"{prefix}{{i}}{{end}}"')
                writer.line(f"for i in {numbers}")
                writer.line("for end in (")
                with writer.indented():
                    for end in self.ends:
                        writer.line(f'"{end}",')
                writer.line(")")
            writer.line("],")


def folded(names: Sequence[str]) -> list[Element]:
    """Elements of a list literal; runs of layers with equal ends become one."""
    elements: list[Element] = []
    position = 0
    while position < len(names):
        prefix, first, ends = _layer(names, position)
        count = 1
        while ends and _layer(names, position + count * len(ends)) == (prefix, first + count, ends):
            count += 1
        if count == 1:
            elements.append(Element(names[position]))
            position += 1
        else:
            elements.append(Element(prefix, range(first, first + count), ends))
            position += count * len(ends)
    return elements


def _layer(names: Sequence[str], position: int) -> tuple[str, int, tuple[str, ...]]:
    """The names of one layer from a position on: what stands before its number, the number, and the ends."""
    ends: list[str] = []
    start: tuple[str, str] | None = None
    for name in names[position:]:
        match = _LAYER.match(name)
        if match is None or (start is not None and match.groups()[:2] != start):
            break
        start = match[1], match[2]
        ends.append(match[3])
    return (start[0], int(start[1]), tuple(ends)) if start is not None else ("", -1, ())
