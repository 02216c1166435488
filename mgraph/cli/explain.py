"""`mgraph explain`: why a package looks as it does.

Without a name: what each pass did. A name is looked for among

* modules of the model (`layers.3`, `*.mlp`): functions, cost, matches and near misses there;
* passes and what they look for (`raise-norm`, `rms_norm`): matches, and near misses with the first guard that failed;
* nodes (an id, FUNCTION:ID, an op): history, origin, cost and kernel, in the last graph that has such nodes.

All that is found is told, in this order.
"""

from __future__ import annotations

import fnmatch
import json
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mgraph.cli.history import Histories, binaries, near_miss_line
from mgraph.cli.modules import ModuleReport, modules_named
from mgraph.cli.snapshots import AGAIN, Compiled, Snapshot, has_kernels, open_package
from mgraph.errors import OptionError, PackageError, did_you_mean
from mgraph.ir.graph import Function, Node
from mgraph.ir.opdef import declared_ops
from mgraph.passes import PASSES
from mgraph.passes.base import Match
from mgraph.passes.instrument import op_count_lines


def run(path: Path, what: str, limit: int) -> None:
    """Write the explanation to stdout. Raises OptionError where the name is nothing of the package."""
    package = open_package(path)
    lines = Explainer(package, limit).about(what) if what else overview(package)
    sys.stdout.write("\n".join(lines) + "\n")


def overview(package: Compiled) -> list[str]:
    """The package in a few lines, then a line per pass."""
    manifest = package.manifest
    entries = ", ".join(manifest.get("entries", {}))
    lines = [f"{manifest['name']}, for {manifest['kind']}: entries {entries}"]
    lines += [f"  kernel {kernel['name']}: {binaries(kernel)}" for kernel in manifest["kernels"]]
    lines += [f"  {line}" for line in _fit(package)]
    lines.append("")
    return lines + [_pass_line(snapshot) for snapshot in package.snapshots[1:]]


def _fit(package: Compiled) -> list[str]:
    """With a budget of memory: the plan that was chosen, and those that were looked at."""
    file = package.path / "graphs" / "compilation.json"
    try:
        noted = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        return [str(line) for line in noted.get("fit", ())]
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise PackageError(f"what was noted of the compilation cannot be read: {error}", str(file), AGAIN) from error


def _pass_line(snapshot: Snapshot) -> str:
    record, report = snapshot.record, snapshot.report
    seconds = record["measured"].get("seconds", 0.0)
    facts = [f"{seconds:.3f} s", "changed the graph" if record["changed"] else "no change"]
    if "verify" in record["measured"]:
        facts.append(record["measured"]["verify"]["status"])
    facts += [f"{name} {number}" for name, number in report.counts.items()]
    if report.near_misses:
        facts.append(f"{len(report.near_misses)} near misses")
    return f"{snapshot.number:>3} {record['spec']}: {', '.join(facts)}"


@dataclass
class Explainer:
    """Answers one question about a package."""

    package: Compiled
    limit: int

    @cached_property
    def _histories(self) -> Histories:
        return Histories(self.package)

    def about(self, what: str) -> list[str]:
        """Lines about all that a name or a pattern of names means."""
        modules = modules_named(self.package, what)
        lines = ModuleReport(self.package, self._histories, self.limit).lines(modules)
        for snapshot in self.package.snapshots[1:]:
            lines += self._pass_lines(snapshot, what)
        snapshot, nodes = self._nodes(what)
        for function, node in nodes[: self.limit]:
            lines += [*self._histories.lines(snapshot, function, node), ""]
        if len(nodes) > self.limit:
            lines.append(f"… and {len(nodes) - self.limit} more nodes (--limit)")
        if not lines and what in declared_ops():
            return [f"no {what} in any graph of the package, and no place that was nearly one"]
        if not lines and what in PASSES:
            why = "what was asked for does without it, or it is disabled"
            if not has_kernels(self.package.manifest):
                why += "; passes for GPUs need a --target with kernels"
            return [f"the pass {what} is none of the package's: {why}"]
        if not lines:
            raise OptionError(f"nothing in the package is named '{what}'", str(self.package.path), self._hint(what))
        while lines[-1] == "":
            lines.pop()
        return lines

    def _pass_lines(self, snapshot: Snapshot, what: str) -> list[str]:
        """A pass that is named, whole, or of another one the matches and near misses of the pattern that is named."""
        report = snapshot.report
        named = what == str(snapshot.number) or fnmatch.fnmatchcase(snapshot.name, what)
        matches = [m for m in report.matches if named or (m.made and fnmatch.fnmatchcase(_pattern_of(m), what))]
        misses = [m for m in report.near_misses if named or fnmatch.fnmatchcase(m.pattern, what)]
        if not (named or matches or misses):
            return []
        lines = [_pass_line(snapshot)]
        if named:
            lines += [f"      {line}" for line in op_count_lines(snapshot.record["measured"].get("ops", {}))]
        told = [f"      at @{m.function} %{m.node}: {m.detail}".rstrip(": ") for m in matches]
        lines += _limited(told, self.limit, "      … and {} more matches (--limit)")
        told = [near_miss_line(snapshot, miss) for miss in misses]
        return [*lines, *(_limited(told, self.limit, "… and {} more near misses (--limit)") or ["no near misses"]), ""]

    def _nodes(self, what: str) -> tuple[Snapshot, list[tuple[Function, Node]]]:
        """The nodes that a name means, and the last graph that has any."""
        for snapshot in reversed(self.package.snapshots):
            found = [(f, n) for f, n in snapshot.module.walk() if _names(what, f, n)]
            if found:
                return snapshot, found
        return self.package.snapshots[-1], []

    def _hint(self, what: str) -> str:
        """The nearest name, of nodes, ops, modules, functions, passes and patterns."""
        known = {s.name for s in self.package.snapshots}
        for snapshot in self.package.snapshots:
            report = snapshot.report
            known |= {m.pattern for m in report.near_misses} | {_pattern_of(m) for m in report.matches if m.made}
        for _, node in self.package.snapshots[-1].module.walk():
            parts = node.origin.path.split(".")
            known |= {node.id, node.op, *(".".join(parts[:end]) for end in range(1, len(parts) + 1))}
        near = did_you_mean(what.rpartition(":")[2], known - {""})
        return near if near.startswith("did you mean") else "mgraph dump shows ids and ops, mgraph explain the passes"


def _pattern_of(match: Match) -> str:
    """What a pass found at a match: its detail begins with the name of the pattern."""
    return match.detail.partition(" ")[0]


def _names(what: str, function: Function, node: Node) -> bool:
    """Whether a name means a node: its id, FUNCTION:ID or op; `@` and `%` may stand before, `*` and `?` are wild."""
    inside, colon, wanted = what.replace("@", "").replace("%", "").rpartition(":")
    if colon and not fnmatch.fnmatchcase(function.name, inside):
        return False
    # A call's further results go by the names that they have in the function called: those nodes are meant.
    named = node.results[:1] if node.op == "call" else node.results
    return any(fnmatch.fnmatchcase(name, wanted) for name in [node.op, *(value.name for value in named)])


def _limited(lines: list[str], limit: int, more: str) -> list[str]:
    return [*lines[:limit], *([more.format(len(lines) - limit)] if len(lines) > limit else [])]
