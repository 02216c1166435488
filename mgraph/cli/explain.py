"""`mgraph explain`: why a package looks as it does.

Without a pattern: what each pass did. With one: every node it names in the last graph (else in the last graph that had
such nodes) with its history, origin, type and kernel; then the passes it names, and the near misses at those nodes or
of those names: places where a fusion almost applied, with the first guard that failed.
"""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgraph.cli.emitted import EmittedLine, emitted_lines
from mgraph.cli.snapshots import Compiled, Snapshot, open_package
from mgraph.errors import OptionError, did_you_mean
from mgraph.ir.diff import FunctionDiff, diff_modules
from mgraph.ir.graph import Function, Node
from mgraph.ir.printer import node_text
from mgraph.passes.base import NearMiss
from mgraph.passes.instrument import op_count_lines


def run(path: Path, what: str, limit: int) -> None:
    """Write the explanation to stdout. Raises OptionError where the pattern names nothing."""
    package = open_package(path)
    lines = Explainer(package, limit).about(what) if what else overview(package)
    sys.stdout.write("\n".join(lines) + "\n")


def overview(package: Compiled) -> list[str]:
    """The package in a few lines, then a line per pass."""
    manifest = package.manifest
    entries = ", ".join(manifest.get("entries", {}))
    lines = [f"{manifest['name']}, for {manifest['kind']}: entries {entries}"]
    lines += [f"  kernel {kernel['name']}: {_binaries(kernel)}" for kernel in manifest["kernels"]]
    lines.append("")
    for snapshot in package.snapshots[1:]:
        lines += _pass_lines(snapshot, details=False)
    return lines


def _binaries(kernel: dict[str, Any]) -> str:
    """The GPU architectures that a kernel has binaries for."""
    archs = sorted({binary["arch"] for launch in kernel.get("launches", ()) for binary in launch.get("binaries", ())})
    return f"binaries for {', '.join(archs)}" if archs else "no binary; the torch twin runs"


def _pass_lines(snapshot: Snapshot, *, details: bool) -> list[str]:
    record, report = snapshot.record, snapshot.report
    seconds = record["measured"].get("seconds", 0.0)
    facts = [f"{seconds:.3f} s", "changed the graph" if record["changed"] else "no change"]
    if "verify" in record["measured"]:
        facts.append(record["measured"]["verify"]["status"])
    facts += [f"{name} {number}" for name, number in report.counts.items()]
    if report.near_misses:
        facts.append(f"{len(report.near_misses)} near misses")
    lines = [f"{snapshot.number:>3} {record['spec']}: {', '.join(facts)}"]
    if details:
        lines += [f"      {line}" for line in op_count_lines(record["measured"].get("ops", {}))]
        lines += [f"      at @{m.function} %{m.node}: {m.detail}".rstrip(": ") for m in report.matches]
    return lines


def near_miss_line(snapshot: Snapshot, miss: NearMiss) -> str:
    """Which pattern of which pass failed where, and why."""
    detail = f": {miss.detail}" if miss.detail else ""
    return f"{snapshot.title}: {miss.pattern} did not apply at @{miss.function} %{miss.node}, {miss.guard}{detail}"


@dataclass
class Explainer:
    """Answers one question about a package."""

    package: Compiled
    limit: int

    def about(self, pattern: str) -> list[str]:
        """Lines about all that a pattern names."""
        snapshot, nodes = self._nodes(pattern)
        lines = []
        history = list(self._diffs()) if nodes else []
        emitted = emitted_lines(self.package.path) if nodes else []
        for function, node in nodes[: self.limit]:
            lines += [*self._node_lines(snapshot, function, node, history, emitted), ""]
        if len(nodes) > self.limit:
            lines += [f"… and {len(nodes) - self.limit} more nodes (--limit)", ""]
        passes = [s for s in self.package.snapshots[1:] if fnmatch.fnmatchcase(s.name, pattern)]
        for found in passes:
            lines += [*_pass_lines(found, details=True), ""]
        misses = list(self._near_misses(pattern, nodes, passes))
        lines += misses[: self.limit]
        if len(misses) > self.limit:
            lines.append(f"… and {len(misses) - self.limit} more near misses (--limit)")
        if passes and not misses:
            lines.append("no near misses")
        if not lines:
            raise OptionError(
                f"nothing in the package is named '{pattern}'", str(self.package.path), self._hint(pattern)
            )
        return lines

    def _nodes(self, pattern: str) -> tuple[Snapshot, list[tuple[Function, Node]]]:
        """The nodes that a pattern names, and the last graph that has any."""
        for snapshot in reversed(self.package.snapshots):
            found = [(f, n) for f, n in snapshot.module.walk() if _names(pattern, f, n)]
            if found:
                return snapshot, found
        return self.package.snapshots[-1], []

    def _diffs(self) -> Iterator[tuple[Snapshot, dict[str, FunctionDiff]]]:
        """Per pass that changed the graph, what it changed in each function."""
        for before, after in self.package.steps():
            yield after, {f.name: f for f in diff_modules(before.module, after.module).functions}

    def _node_lines(
        self,
        snapshot: Snapshot,
        function: Function,
        node: Node,
        history: list[tuple[Snapshot, dict[str, FunctionDiff]]],
        emitted: list[EmittedLine],
    ) -> list[str]:
        last = self.package.snapshots[-1]
        gone = "" if snapshot is last else f" (in the graph after {snapshot.title}; gone later)"
        lines = [f"@{function.name} %{node.id}{gone}", f"  {node_text(node, snapshot.module.functions)}"]
        lines += [f"  type     {value!r}: {value.type}" for value in node.results]
        lines.append(f"  from     {node.origin}" + (f", module {node.origin.path}" if node.origin.path else ""))
        lines.append(f"  made by  {node.made_by}")
        for step, functions in history:
            events = list(_events(functions, function.name, node.id))
            events += [
                f"matched {m.detail}"
                for m in step.report.matches
                if m.detail and ((m.node, m.function) == (node.id, function.name) or _made(step, m.detail, node))
            ]
            lines += [f"  {step.title}: {event}" for event in dict.fromkeys(events)]
        if snapshot is last:
            lines += [f"  emitted  {line.text}" for line in emitted if line.is_from(function.name, node.origin)]
        kernels = {k["name"]: k for k in self.package.manifest["kernels"]}
        used = {name for line in emitted if line.is_from(function.name, node.origin) for name in line.kernels}
        lines += [f"  kernel   {name}: {_binaries(kernels[name])}" for name in sorted(used & kernels.keys())]
        return lines

    def _near_misses(self, pattern: str, nodes: list[tuple[Function, Node]], passes: list[Snapshot]) -> Iterator[str]:
        named = {(function.name, node.id) for function, node in nodes}
        for snapshot in self.package.snapshots[1:]:
            for miss in snapshot.report.near_misses:
                wanted = snapshot in passes or (miss.function, miss.node) in named
                if wanted or fnmatch.fnmatchcase(miss.pattern, pattern) or fnmatch.fnmatchcase(miss.node, pattern):
                    yield near_miss_line(snapshot, miss)

    def _hint(self, pattern: str) -> str:
        module = self.package.snapshots[-1].module
        known = {s.name for s in self.package.snapshots} | {n.op for _, n in module.walk()}
        near = did_you_mean(pattern.rpartition(":")[2], known | {n.id for _, n in module.walk()})
        return near if near.startswith("did you mean") else "mgraph dump shows ids and ops, mgraph explain the passes"


def _names(pattern: str, function: Function, node: Node) -> bool:
    """Whether a pattern means a node: its id, FUNCTION:ID, op, or module path; `@` and `%` may stand before."""
    inside, colon, wanted = pattern.replace("@", "").replace("%", "").rpartition(":")
    if colon and not fnmatch.fnmatchcase(function.name, inside):
        return False
    # A call's further results go by the names that they have in the function called: those nodes are meant.
    named = node.results[:1] if node.op == "call" else node.results
    names = {v.name for v in named} | {node.op, node.origin.path}
    return any(fnmatch.fnmatchcase(name, wanted) for name in names if name)


def _events(functions: dict[str, FunctionDiff], function: str, id_: str) -> Iterator[str]:
    """What one pass did to a node."""
    diff = functions.get(function)
    if diff is None:
        return
    if id_ in diff.added:
        yield "added it" if diff.status != "added" else "added it, with its function"
    if id_ in diff.removed:
        yield "removed it"
    for move in diff.moved:
        if move.id == id_ and move.function:
            yield f"moved it here from @{move.function}"
    for change in diff.changed:
        if change.id == id_:
            yield f"changed its {', '.join(change.what)}; before: {change.before}"


def _made(step: Snapshot, detail: str, node: Node) -> bool:
    """Whether a match of a pass is the one that made the node: a match names the chain that was there before."""
    return step.name == node.made_by and node.op in detail and node.origin.path in detail and str(node.origin) in detail
