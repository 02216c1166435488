"""`mgraph memory`: the memory that a rank of a package needs, predicted, and what makes up its peak.

State by kind, then each entry's peak, each function's, and the tensors that are there at the peak of an entry, with the
lines of the model that they come from.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgraph.cli.collectives import recipe_sizes
from mgraph.cli.graphs import check_format
from mgraph.cli.snapshots import Compiled, open_package
from mgraph.cli.table import table
from mgraph.codegen.memory import Peak, Point, Profile, RankMemory, Storage
from mgraph.codegen.prepare import called
from mgraph.errors import OptionError, did_you_mean
from mgraph.ir.graph import Node, StateKind
from mgraph.ir.local import declared_sizes
from mgraph.ir.mesh import mesh_sizes
from mgraph.passes.activations import extents
from mgraph.passes.recompute import size_text
from mgraph.serving_plan import ServingPlan

FORMATS = ("text", "json", "svg", "html")
SERVED = ("N", "R", "T")
"""Dims of what is served: rows of logits, requests and tokens of a step."""
_KINDS = {
    "parameters": (StateKind.PARAM,),
    "gradients": (StateKind.GRAD,),
    "optimizer state": (StateKind.MASTER, StateKind.MOMENT),
    "buffers and scalars": (StateKind.BUFFER, StateKind.SCALAR),
    "cache": (StateKind.CACHE,),
}


@dataclass(frozen=True)
class Forecast:
    """The memory of one rank: state by kind, peaks by entry, profiles and numbers of calls by function, bytes of the
    host, and what is there over each entry."""

    name: str
    sizes: Mapping[str, int]
    mesh: Mapping[str, int]
    state: Mapping[str, int]
    entries: Mapping[str, Peak]
    functions: Mapping[str, tuple[int, Profile]]
    reserved: int
    host: Mapping[str, int]
    timelines: Mapping[str, tuple[Point, ...]]

    @property
    def total(self) -> int:
        """Bytes of the state and of the highest peak."""
        return sum(self.state.values()) + max((peak.bytes for peak in self.entries.values()), default=0)


def run(path: Path, batch_size: int, seq_len: int, ranks: int, entry: str, limit: int, form: str) -> None:
    """Write the forecast to stdout; 0 and "" mean the recipe's sizes, the fewest ranks, the entry of the highest peak.

    Raises OptionError for sizes that the package was not compiled for, and for an entry that it has not.
    """
    check_format(form, FORMATS)
    package = open_package(path)
    found = forecast(package, {"B": batch_size, "S": seq_len}, ranks)
    if entry and entry not in found.entries:
        raise OptionError(f"the package has no entry '{entry}'", str(path), did_you_mean(entry, found.entries))
    shown = entry or max(found.entries, key=lambda name: found.entries[name].bytes)
    facts = package.manifest.get("graph_plan", {})
    plan = ServingPlan.of(facts) if "memory" in facts else None
    if form == "json":
        serving = {"serving": {**plan.facts(), "total": plan.memory.total}} if plan else {}
        sys.stdout.write(json.dumps(_data(found, shown) | serving, indent=1) + "\n")
    elif form == "text":
        sys.stdout.write("\n".join(_text(found, shown, limit)))
        if plan is not None:
            sys.stdout.write("".join(f"\n{line}" for line in ("when it serves:", *plan.lines())) + "\n")
    else:
        from mgraph.cli.memory_picture import Bands, to_html, to_svg

        bands = Bands(found.state, {shown: found.timelines[shown]} if entry else _step(found))
        title = _title(found)
        text = to_svg(title, bands) if form == "svg" else to_html(title, bands, "\n".join(_text(found, shown, limit)))
        sys.stdout.write(text)


def forecast(package: Compiled, given: Mapping[str, int], ranks: int) -> Forecast:
    """The forecast of a package for extents of its named dims (0: the recipe's) and a number of ranks (0: fewest)."""
    module = package.snapshots[-1].module
    wanted = wanted_sizes(package, given)
    fewest = 1
    for size in declared_sizes(module).values():
        fewest *= size
    mesh = mesh_sizes(module.mesh, {}, ranks or fewest)
    sizes = extents(module, wanted)
    memory = RankMemory(module, sizes, mesh)
    kinds = memory.state()
    state = {label: total for label, of in _KINDS.items() if (total := sum(kinds.get(kind, 0) for kind in of))}
    entries = {name: memory.entry(name) for name in module.entries}
    calls = Counter(called(node) for _, node in module.walk() if node.op == "call")
    functions = {name: (calls[name], profile) for name, profile in memory.functions().items()}
    named = {n: sizes[n] for n in wanted if n in sizes}
    host = {label: total for label, total in memory.host().items() if total}
    timelines = {name: memory.timeline(name) for name in module.entries}
    return Forecast(module.name, named, mesh, state, entries, functions, memory.reserved(), host, timelines)


def wanted_sizes(package: Compiled, given: Mapping[str, int]) -> dict[str, int]:
    """Extents of B and S: as given, or (0) the recipe's; of what is served, of a step in which each of B requests (0:
    one) has a token. Raises OptionError for others than the package is for."""
    module = package.snapshots[-1].module
    if package.manifest["kind"] == "serve":
        if given.get("S"):
            raise OptionError("a step that serves has no sequences", str(package.path), "leave out --seq-len")
        return dict.fromkeys(SERVED, given.get("B") or 1)
    wanted = recipe_sizes(package.manifest) | {name: size for name, size in given.items() if size}
    for name in (n for n in wanted if n in module.dims):
        dim, flag = module.dims[name], {"B": "--batch-size", "S": "--seq-len"}[name]
        if wanted[name] < dim.minimum or (dim.maximum is not None and wanted[name] > dim.maximum):
            allowed = f"from {dim.minimum} to {dim.maximum if dim.maximum is not None else 'any size'}"
            raise OptionError(
                f"{name} is {wanted[name]}, and {allowed} in this package", str(package.path), f"give {flag}"
            )
    return wanted


def _step(found: Forecast) -> dict[str, tuple[Point, ...]]:
    """The timelines of the entries of a step, or of all where the package does not train."""
    step = ("last",) if "last" in found.timelines else ("microbatch", "finish")
    return {name: found.timelines[name] for name in step if name in found.timelines} or dict(found.timelines)


def _title(found: Forecast) -> str:
    sizes = ", ".join(f"{name}={size}" for name, size in found.sizes.items())
    mesh = ", ".join(f"{axis}={size}" for axis, size in found.mesh.items())
    return f"{found.name}, one rank{f' of {mesh}' if mesh else ''}; {sizes}"


def _text(found: Forecast, shown: str, limit: int) -> list[str]:
    rows = [(label, size_text(size)) for label, size in found.state.items()]
    highest = max(found.entries, key=lambda name: found.entries[name].bytes)
    rows += [(f"peak of {highest}", size_text(found.entries[highest].bytes)), ("in all", size_text(found.total))]
    if found.reserved > found.total:
        rows.append(("with what CUDA graphs keep", size_text(found.reserved)))
    rows += [(f"on the host: {label}", size_text(size)) for label, size in found.host.items()]
    peaks = [(name, size_text(peak.bytes), *_where(peak)) for name, peak in found.entries.items()]
    functions = [
        (name, str(count), size_text(profile.peak.bytes), size_text(profile.kept), *_where(profile.peak))
        for name, (count, profile) in found.functions.items()
    ]
    groups = _groups(found.entries[shown].alive)
    alive = [
        (size_text(total), str(count), f"@{first.function} %{first.value.name}", str(first.value.type), *_source(first))
        for count, total, first in groups[:limit]
    ]
    sections = [
        f"{_title(found)}\n",
        table(("what", "size"), rows),
        table(("entry", "peak", "at", "source"), peaks),
    ]
    if functions:
        sections.append(table(("function", "calls", "peak", "kept", "at", "source"), functions))
    sections.append(
        f"at the peak of {shown}, {size_text(found.entries[shown].bytes)}\n"
        + table(("size", "tensors", "value", "each", "op", "source"), alive)
        + (f"… and {len(groups) - limit} more (--limit)\n" if len(groups) > limit else "")
    )
    return sections


def _groups(alive: Iterable[Storage]) -> list[tuple[int, int, Storage]]:
    """The tensors at a peak, those of one value together: how many, bytes in all, one of them; the largest first."""
    groups: dict[tuple[str, str], list[Storage]] = {}
    for storage in alive:
        groups.setdefault((storage.function, storage.value.name), []).append(storage)
    made = [(len(group), sum(s.bytes for s in group), group[0]) for group in groups.values()]
    return sorted(made, key=lambda group: -group[1])


def _where(peak: Peak) -> tuple[str, str]:
    return (f"@{peak.function} %{peak.node.id}" if peak.node else "the inputs", _line(peak.node))


def _source(storage: Storage) -> tuple[str, str]:
    return (storage.node.op if storage.node else "input", _line(storage.node))


def _line(node: Node | None) -> str:
    return str(node.origin) if node is not None and node.origin.file else ""


def _data(found: Forecast, shown: str) -> dict[str, Any]:
    return {
        "name": found.name,
        "sizes": dict(found.sizes),
        "mesh": dict(found.mesh),
        "state": dict(found.state),
        "total": found.total,
        "reserved": found.reserved,
        "host": dict(found.host),
        "entries": {name: _peak_data(peak) for name, peak in found.entries.items()},
        "functions": {
            name: {"calls": count, "kept": profile.kept, **_peak_data(profile.peak)}
            for name, (count, profile) in found.functions.items()
        },
        "alive": {
            "entry": shown,
            "tensors": [
                {
                    "count": count,
                    "bytes": total,
                    "function": first.function,
                    "value": first.value.name,
                    "type": str(first.value.type),
                    "op": first.node.op if first.node else None,
                    "source": _line(first.node),
                }
                for count, total, first in _groups(found.entries[shown].alive)
            ],
        },
    }


def _peak_data(peak: Peak) -> dict[str, Any]:
    node = peak.node.id if peak.node else None
    return {"peak": peak.bytes, "function": peak.function, "node": node, "source": _line(peak.node)}
