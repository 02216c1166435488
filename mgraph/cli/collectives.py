"""`mgraph collectives`: which collectives a package issues, in which order, and how much each rank hands over."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgraph.cli import token_ways
from mgraph.cli.graphs import check_format
from mgraph.cli.snapshots import open_package
from mgraph.cli.table import table
from mgraph.ir.collectives import SPLIT, CollectiveOrder, Issued, Overlap, Run, message_bytes, overlap
from mgraph.ir.dims import Dim, Extent, dim_text, evaluate, names_in
from mgraph.passes.recompute import size_text

FORMATS = ("text", "json")
HEADER = ("order", "times", "collective", "axis", "ranks", "bytes", "size", "in", "overlaps", "source")


@dataclass(frozen=True)
class Line:
    """One collective of an entry: what it is, where, how often, and how many bytes a rank hands over each time."""

    entry: str
    run: Run
    ranks: str
    bytes: Dim
    evaluated: int | None
    """The bytes at the recipe's sizes; None where they depend on a dim that it says nothing of."""

    @property
    def issued(self) -> Issued:
        """The node."""
        return self.run.issued

    @property
    def order(self) -> str:
        """Its place in the entry's sequence, or the first and last of its places."""
        first, last = self.run.first, self.run.last
        return str(first) if first == last else f"{first}-{last}"

    @property
    def place(self) -> str:
        """`@layer.fwd layers.*.mlp`."""
        return f"@{self.issued.function.name} {self.issued.node.origin.path}".rstrip()


def run(path: Path, form: str) -> None:
    """Write the collectives of a package to stdout, entry by entry, in their order; then the volume over each axis."""
    check_format(form, FORMATS)
    package = open_package(path)
    order = CollectiveOrder(package.snapshots[-1].module)
    sizes = recipe_sizes(package.manifest)
    lines = [line for entry in order.module.entries for line in _lines(order, entry, sizes)]
    if form == "json":
        sys.stdout.write(json.dumps([_data(order, line) for line in lines], indent=1) + "\n")
    else:
        sys.stdout.write("".join(_text(order, lines, sizes)))


def recipe_sizes(manifest: Mapping[str, Any]) -> dict[str, int]:
    """The extents of the microbatch that the recipe speaks of, by dim."""
    options = manifest.get("fingerprint", {}).get("options", {})
    return {dim: options[name] for dim, name in (("B", "batch"), ("S", "seq")) if name in options}


def _lines(order: CollectiveOrder, entry: str, sizes: Mapping[str, int]) -> Iterator[Line]:
    for found in order.runs(entry):
        ranks = order.shares.size(found.issued.axis)
        size = message_bytes(order, found.issued)
        known = names_in(size) <= sizes.keys()
        yield Line(
            entry,
            found,
            "*" if ranks is None else str(ranks),
            size,
            math.floor(evaluate(size, sizes)) if known else None,
        )


def _text(order: CollectiveOrder, lines: list[Line], sizes: Mapping[str, int]) -> Iterator[str]:
    if not lines:
        yield "no collectives: every rank works alone\n"
        return
    at = ", ".join(f"{name}={size}" for name, size in sizes.items())
    yield "bytes: of one message, on its larger side (what a gather gives, what all others take); size: "
    yield f"the same at {at}"
    read = any(dim.extent is Extent.HOST for dim in order.module.dims.values())
    yield "; at most, where the host reads how many rows there are\n" if read else "\n"
    for entry in dict.fromkeys(line.entry for line in lines):
        rows = [_row(order, line) for line in lines if line.entry == entry]
        yield f"\n{entry}: {_number(order.length(entry), 'collective')}\n{table(HEADER, rows)}"
    yield "\n" + table(("axis", "ranks", "entry", "collectives", "bytes"), _totals(lines))
    if tokens := token_ways.text(order.module, sizes):
        yield f"\n{tokens}"


def _row(order: CollectiveOrder, line: Line) -> tuple[str, ...]:
    issued = line.issued
    evaluated = "" if line.evaluated is None else size_text(line.evaluated)
    return (
        line.order,
        str(line.run.times),
        issued.kind,
        issued.axis,
        line.ranks,
        dim_text(line.bytes),
        evaluated,
        line.place,
        _overlap_text(order, issued),
        f"{issued.node.origin}",
    )


def _overlap_text(order: CollectiveOrder, issued: Issued) -> str:
    """What runs while the collective is under way."""
    between = _overlap(order, issued)
    if between is None or not between.nodes:
        return "nothing"
    return f"{_number(between.nodes, 'node')}, {dim_text(between.flops)} flops"


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _overlap(order: CollectiveOrder, issued: Issued) -> Overlap | None:
    """The window of a collective that is split in two."""
    return overlap(order, issued) if issued.node.op.removesuffix("_").endswith(SPLIT) else None


def _totals(lines: list[Line]) -> Iterator[tuple[str, ...]]:
    """Calls and bytes of each entry over each axis."""
    for axis in dict.fromkeys(line.issued.axis for line in lines):
        for entry in dict.fromkeys(line.entry for line in lines):
            found = [line for line in lines if (line.issued.axis, line.entry) == (axis, entry)]
            if found:
                known = [line.evaluated * line.run.times for line in found if line.evaluated is not None]
                total = size_text(sum(known)) if len(known) == len(found) else "?"
                yield axis, found[0].ranks, entry, str(sum(line.run.times for line in found)), total


def _data(order: CollectiveOrder, line: Line) -> dict[str, Any]:
    issued = line.issued
    between = _overlap(order, issued)
    return {
        "entry": line.entry,
        "first": line.run.first,
        "last": line.run.last,
        "times": line.run.times,
        "kind": issued.kind,
        "axis": issued.axis,
        "ranks": line.ranks,
        "bytes": dim_text(line.bytes),
        "evaluated": line.evaluated,
        "function": issued.function.name,
        "node": issued.node.id,
        "layer": issued.node.origin.path,
        "source": str(issued.node.origin),
        "tensors": len(issued.node.operands),
        "overlap": None if between is None else {"nodes": between.nodes, "flops": dim_text(between.flops)},
    }
