"""What `mgraph explain` says about one node: where it comes from, what each pass did to it, what it became."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mgraph.cli.costs import cost_text
from mgraph.cli.emitted import EmittedLine, emitted_lines
from mgraph.cli.snapshots import Compiled, Snapshot
from mgraph.ir.diff import FunctionDiff, diff_modules
from mgraph.ir.diff_text import change_text
from mgraph.ir.graph import Function, Node
from mgraph.ir.printer import callee_of, node_text
from mgraph.passes.base import NearMiss


def binaries(kernel: dict[str, Any]) -> str:
    """The GPU architectures that a kernel of the manifest has binaries for."""
    archs = sorted({binary["arch"] for launch in kernel.get("launches", ()) for binary in launch.get("binaries", ())})
    return f"binaries for {', '.join(archs)}" if archs else "no binary; the torch twin runs"


def near_miss_line(snapshot: Snapshot, miss: NearMiss) -> str:
    """Which pattern of which pass failed where, and why."""
    detail = f": {miss.detail}" if miss.detail else ""
    return f"{snapshot.title}: {miss.pattern} did not apply at @{miss.function} %{miss.node}, {miss.guard}{detail}"


@dataclass
class Histories:
    """Tells the history of nodes of a package."""

    package: Compiled

    @cached_property
    def emitted(self) -> list[EmittedLine]:
        """The lines of step.py."""
        return emitted_lines(self.package.path)

    @cached_property
    def _steps(self) -> list[tuple[Snapshot, Snapshot, dict[str, FunctionDiff]]]:
        """Per pass: the graphs before and after, and what changed in each function."""
        return [
            (before, after, {f.name: f for f in diff_modules(before.module, after.module).functions})
            for before, after in self.package.passes()
        ]

    def lines(self, snapshot: Snapshot, function: Function, node: Node) -> list[str]:
        """All about a node of the graph after a pass."""
        last = self.package.snapshots[-1]
        gone = "" if snapshot is last else f" (in the graph after {snapshot.title}; gone later)"
        lines = [f"@{function.name} %{node.id}{gone}", f"  {node_text(node, snapshot.module.functions)}"]
        lines += [f"  type     {value!r}: {value.type}" for value in node.results]
        lines.append(f"  from     {node.origin}" + (f", module {node.origin.path}" if node.origin.path else ""))
        lines.append(f"  made by  {node.made_by}")
        lines += [f"  {event}" for event in self._events(snapshot, function.name, node)]
        callee = callee_of(node)
        lines.append(f"  cost     {cost_text([node]) if callee is None else f'that of @{callee}'}")
        if snapshot is last:
            lines += self._emitted_lines(function, node, callee)
        return lines

    def _events(self, snapshot: Snapshot, function: str, node: Node) -> list[str]:
        """What the passes did to a node, in order, found backwards: it may have come from another function."""
        name, events = function, list[str]()
        for before, after, functions in reversed(self._steps):
            if after.number <= snapshot.number:
                diff = functions[name]
                events += reversed(_told(before, after, diff, node))
                if node.id in diff.added:
                    break
                name = _source(diff, node.id)
            elif name in functions and node.id in functions[name].removed:
                events.append(f"{after.title}: removed it")
        return events[::-1]

    def _emitted_lines(self, function: Function, node: Node, callee: str | None) -> Iterator[str]:
        def is_of(line: EmittedLine) -> bool:
            if callee is not None:
                return line.is_in(function.name) and line.calls(callee)
            return line.is_from(function.name, node.origin)

        found = [line for line in self.emitted if is_of(line)]
        yield from (f"  emitted  {line.text}" for line in found)
        kernels = {k["name"]: k for k in self.package.manifest["kernels"]}
        used = {name for line in found for name in line.kernels}
        yield from (f"  kernel   {name}: {binaries(kernels[name])}" for name in sorted(used & kernels.keys()))
        for chosen in self.package.manifest.get("providers", ()):
            if (chosen["function"], chosen["node"]) == (function.name, node.id):
                yield from _provider_lines(chosen)


def _provider_lines(chosen: Mapping[str, Any]) -> Iterator[str]:
    """Who runs a node, who is next, and who does not take it."""
    asked = " (asked for)" if chosen.get("forced") else ""
    other = f"; next {_timed(chosen['next'])}" if chosen["next"] else ""
    yield f"  run by   {_timed(chosen)}{asked}{other}"
    yield from (f"  not by   {name}: {reason}" for name, reason in chosen["refused"].items())


def _timed(candidate: Mapping[str, Any]) -> str:
    return f"{candidate['provider']}, {candidate['microseconds']:.1f} us {candidate['basis']}"


def _source(diff: FunctionDiff, id_: str) -> str:
    """The function that had a node before a pass."""
    for move in diff.moved:
        if move.id == id_ and move.function:
            return move.function
    for change in diff.changed:
        if change.id == id_ and "function" in change.parts:
            return change.parts["function"][0].removeprefix("@")
    return diff.like or diff.name


def _told(before: Snapshot, after: Snapshot, diff: FunctionDiff, node: Node) -> list[str]:
    """What a pass did to a node."""
    said = []
    if node.id in diff.added:
        said.append("added it" if diff.status != "added" else "added it, with its function")
    for move in diff.moved:
        if move.id == node.id:
            where = f"here from @{move.function}" if move.function else "within the function"
            said.append(f"moved it {where}" if not move.phase else f"moved it {where}, out of phase {move.phase}")
    if diff.like and _source(diff, node.id) == diff.like and node.id not in diff.added:
        said.append(f"copied it from @{diff.like}, with its function")
    said += [f"changed its {change_text(change)}" for change in diff.changed if change.id == node.id]
    for match in after.report.matches:
        if match.function == diff.name and node.id in (match.made or (match.node,)):
            said += [f"matched {match.detail}"] * bool(match.detail)
            said += [f"in place of {_chain(before, diff.name, match.replaced)}"] * bool(match.replaced)
    misses = [m for m in after.report.near_misses if (m.function, m.node) == (diff.name, node.id)]
    return [*(f"{after.title}: {text}" for text in said), *(near_miss_line(after, miss) for miss in misses)]


def _chain(before: Snapshot, function: str, ids: tuple[str, ...]) -> str:
    ops = {node.id: node.op for node in before.module.functions[function].nodes}
    return ", ".join(f"%{id_} {ops[id_]}" for id_ in ids)
