"""What `mgraph explain` says about modules of the model: a layer (`layers.3`), or all that a glob names (`*.mlp`).

Repeated layers share their functions, in which the number of a layer is written `*`. `layers.3` therefore means the
functions that layer 3 calls, and `layers.*.attn` one part of them.
"""

from __future__ import annotations

import fnmatch
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from mgraph.cli.costs import cost_text
from mgraph.cli.emitted import ranges
from mgraph.cli.history import Histories, near_miss_line
from mgraph.cli.snapshots import Compiled, Snapshot
from mgraph.ir.graph import Function, Module, Node, StateKind
from mgraph.ir.printer import callee_of


@dataclass(frozen=True)
class Named:
    """What a pattern names: module paths as the graph has them, and for each the instances that are meant."""

    pattern: str
    instances: dict[str, list[str]]


def modules_named(package: Compiled, pattern: str) -> Named:
    """The modules of a pattern: whole paths or their ends, with wildcards; a number means that one layer."""
    module = package.snapshots[-1].module
    found: dict[str, None] = {}
    for node in (n for _, n in module.walk() if n.op != "call"):
        path = path_named(pattern, node.origin.path)
        if path:
            found[path] = None
    instances = {p: [i for i in _instances(module, p) if _fits(pattern, p) or _fits(pattern, i)] for p in found}
    return Named(pattern, {path: listed for path, listed in instances.items() if listed})


def path_named(pattern: str, path: str) -> str:
    """The outermost module on a path that a pattern names, or nothing. In the path, `*` stands for any number."""
    parts = path.split(".") if path else []
    starred = ".".join("[*]" if part.isdigit() else part for part in pattern.split("."))
    for end in range(1, len(parts) + 1):
        outer = ".".join(parts[:end])
        if _fits(pattern, outer) or (starred != "[*]" and _fits(starred, outer)):
            return outer
    return ""


def _fits(pattern: str, path: str) -> bool:
    return fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(path, f"*.{pattern}")


def _instances(module: Module, path: str) -> list[str]:
    """The modules that a path with `*` stands for, by the calls that lead there and by the names of parameters."""
    wanted = path.split(".")
    depth = max((i + 1 for i, part in enumerate(wanted) if part == "*"), default=0)
    found: dict[str, None] = {}
    for name in [*(node.origin.path for _, node in module.walk()), *module.state]:
        parts = name.split(".")[:depth]
        fits = [p.isdigit() if w == "*" else p == w for w, p in zip(wanted[:depth], parts, strict=False)]
        if depth and len(parts) == depth and all(fits):
            found[".".join([*parts, *wanted[depth:]])] = None
    return list(found) or [path]


@dataclass
class ModuleReport:
    """Writes about the modules of a pattern."""

    package: Compiled
    histories: Histories
    limit: int

    def lines(self, named: Named) -> list[str]:
        """A block for each module path."""
        lines: list[str] = []
        for path, instances in list(named.instances.items())[: self.limit]:
            lines += [*self._block(path, instances), ""]
        if len(named.instances) > self.limit:
            lines += [f"… and {len(named.instances) - self.limit} more modules (--limit)", ""]
        return lines

    def _block(self, path: str, instances: list[str]) -> Iterator[str]:
        snapshot = self.package.snapshots[-1]
        module = snapshot.module
        every = _instances(module, path)
        inside = {f.name: [n for n in f.nodes if is_inside(n, path, instances)] for f in module.functions.values()}
        yield _title(path, instances, every)
        nodes = [node for group in inside.values() for node in group]
        sources = dict.fromkeys(str(n.origin) for n in nodes if n.origin.file and n.origin.path == path)
        yield from (f"  from      {source}" for source in list(sources)[: self.limit])
        yield from self._parameters(module, instances[0])
        for name, group in inside.items():
            working = [node for node in group if node.op != "call"]
            if working:
                yield from self._function_lines(module.functions[name], path, working, instances)
        yield from self._matches(path, instances)

    def _parameters(self, module: Module, instance: str) -> Iterator[str]:
        held = [s for n, s in module.state.items() if n.startswith(f"{instance}.") and s.kind is StateKind.PARAM]
        if not held:
            return
        shapes = [f"{s.name.removeprefix(f'{instance}.')} {s.type}" for s in held]
        numbers = sum(math.prod(map(int, s.type.shape)) for s in held)
        more = f", … and {len(shapes) - self.limit} more" if len(shapes) > self.limit else ""
        yield f"  holds     {numbers:,} numbers in {', '.join(shapes[: self.limit])}{more}"

    def _function_lines(self, function: Function, path: str, nodes: list[Node], instances: list[str]) -> Iterator[str]:
        ops = Counter(node.op for node in nodes)
        phases = ", ".join(dict.fromkeys(str(node.phase) for node in nodes))
        yield f"  @{function.name}, {phases}: {', '.join(f'{op} {number}' for op, number in ops.most_common())}"
        yield f"    cost    {cost_text(nodes)}"
        numbers = [
            line.number
            for line in self.histories.emitted
            if line.is_in(function.name) and line.origin and _below(line.origin[0], path)
        ]
        if numbers:
            yield f"    emitted step.py:{ranges(numbers)}"
        yield from self._calls(function.name, instances)

    def _calls(self, name: str, instances: list[str]) -> Iterator[str]:
        """A line per caller."""
        for caller in self.package.snapshots[-1].module.functions.values():
            calls = [n for n in caller.nodes if callee_of(n) == name]
            calls = [n for n in calls if any(_below(i, n.origin.path) for i in instances)]
            if calls:
                times = f"as %{calls[0].id}" if len(calls) == 1 else f"{len(calls)} times"
                numbers = [x.number for x in self.histories.emitted if x.is_in(caller.name) and x.calls(name)]
                where = f", step.py:{ranges(numbers)}" if numbers else ""
                yield f"    called  {times} by @{caller.name}{where}"

    def _matches(self, path: str, instances: list[str]) -> Iterator[str]:
        for before, after in self.package.passes():
            report = after.report
            inside = _inside(before, path, instances)
            found = [m for m in report.matches if m.made and (m.function, m.node) in inside]
            yield from (f"  matched   {after.title}: {m.detail}" for m in found[: self.limit])
            missed = [m for m in report.near_misses if (m.function, m.node) in inside]
            yield from (f"  missed    {near_miss_line(after, miss)}" for miss in missed[: self.limit])


def is_inside(node: Node, path: str, instances: list[str]) -> bool:
    """Whether a node belongs to a module, or to one of its instances where layers are not yet outlined."""
    return _below(node.origin.path, path) or any(_below(node.origin.path, instance) for instance in instances)


def _below(path: str, outer: str) -> bool:
    return path == outer or path.startswith(f"{outer}.")


def _inside(snapshot: Snapshot, path: str, instances: list[str]) -> set[tuple[str, str]]:
    return {(f.name, n.id) for f, n in snapshot.module.walk() if is_inside(n, path, instances)}


def _title(path: str, instances: list[str], every: list[str]) -> str:
    if instances == [path]:
        return f"module {path}"
    if len(instances) == 1:
        return f"module {instances[0]}, one of {len(every)} {path}"
    return f"module {path}: {len(instances)} of them, {instances[0]} … {instances[-1]}"
