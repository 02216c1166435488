"""`mgraph kernels`: what runs each node of a package, what the runner-up would be, and what they take, predicted.

A table for each layer function and entry, the slowest nodes first, then totals over a step. With `--profile` a few
steps run under a profiler, and what each node took stands beside what was predicted. Of a package without kernels for a
GPU nothing is predicted, unless `--rates` names a machine.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mgraph.cli.collectives import recipe_sizes
from mgraph.cli.graphs import check_format
from mgraph.cli.kernel_times import Times, step_times
from mgraph.cli.memory import wanted_sizes
from mgraph.cli.snapshots import Compiled, has_kernels, open_package
from mgraph.cli.table import table
from mgraph.codegen.liveness import ADDING
from mgraph.codegen.package import PROFILE
from mgraph.codegen.prepare import called
from mgraph.codegen.profile import Profile, read_profile
from mgraph.codegen.providers import NCCL, TORCH, Choice, Providers
from mgraph.codegen.torch_provider import absorbable
from mgraph.errors import OptionError, PackageError, did_you_mean
from mgraph.ir.graph import Function, Module, Node, Value
from mgraph.ir.local import declared_sizes
from mgraph.passes.activations import extents
from mgraph.passes.differentiation import VIEWS
from mgraph.passes.recompute import size_text

FORMATS = ("text", "json")
TWIN = "twin"
"""Who runs a kernel site on the CPU: its function of reference.py."""
STEP = ("microbatch", "finish", "step", "likeliest")
"""The entries that a step calls, each once here: of training, and of serving, which ends with one that chooses tokens:
the likeliest, or another that `--entry` names."""
_IDLE = VIEWS | {"joined", "call", "pick", "unpack", "pack", "wait"}


@dataclass(frozen=True)
class Line:
    """A node of a function: calls a step, who runs it, microseconds (None: not predicted) and bytes of one call, where
    it comes from."""

    function: str
    node: str
    op: str
    calls: int
    provider: str
    microseconds: float | None
    basis: str
    bytes: int
    runner_up: str
    runner_up_microseconds: float | None
    refused: Mapping[str, str]
    source: str
    step_line: int | None
    measured_microseconds: float | None = None

    @property
    def total(self) -> float:
        """Microseconds a step, measured where they are."""
        one = self.microseconds if self.measured_microseconds is None else self.measured_microseconds
        return (one or 0.0) * self.calls


def run(
    path: Path,
    sizes: Mapping[str, int],
    entry: str,
    profile: str,
    limit: int,
    form: str,
    measure: bool = False,
    steps: int | None = None,
    device: str | None = None,
) -> None:
    """Write the tables to stdout; `sizes` of B and S as `mgraph memory` takes them, `entry` "" means those of a step.

    With `measure` the package runs `steps` steps (3) on `device` (auto). Raises OptionError for sizes that the package
    was not compiled for, an entry that it has not, an unknown profile, and what cannot be measured; PackageError for a
    package without its profile.
    """
    check_format(form, FORMATS)
    for flag, value in (("--steps", steps), ("--device", device)):
        if value is not None and not measure:
            raise OptionError(f"{flag} is about steps that are measured, and none are", flag, "with --profile")
    package = open_package(path)
    module = package.snapshots[-1].module
    if entry and entry not in module.entries:
        raise OptionError(f"the package has no entry '{entry}'", str(path), did_you_mean(entry, module.entries))
    given = wanted_sizes(package, sizes)
    rates = read_profile(profile, "--rates") if profile else profile_of(package)
    wanted = [entry] if entry else [name for name in STEP if name in module.entries] or list(module.entries)
    lines = forecast(package, rates, given, wanted)
    times = step_times(package, given, device or "auto", steps or 3, entry) if measure else None
    on_cpu = times is not None and times.twins is not None
    predicted = bool(profile) or (has_kernels(package.manifest) and not on_cpu)
    notes = [f"{module.name}, one rank; {', '.join(f'{n}={s}' for n, s in given.items() if n in module.dims)}"]
    if predicted:
        notes[0] += f"; predicted for {rates.card} (profile {rates.name}); ~: estimated, not measured"
        notes[0] += "; what is measured ran elsewhere, by the providers below" if on_cpu else ""
    else:
        lines = [replace(line, microseconds=None, basis="") for line in lines]
        why = "these ran on the CPU" if on_cpu else "no kernels for a GPU in this package"
        notes.append(f"{why}, so no times are predicted; --rates h100: as if run there")
    if predicted and package.manifest.get("providers"):
        notes += _chosen_for(package, given, bool(profile))
    if times is not None:
        lines, other = joined(lines, times)
        notes.append(f"measured on {times.device}, {steps or 3} steps; {other:.0f} us a step belong to no node")
    if form == "json":
        data = {"name": module.name, "sizes": given, "profile": rates.name if predicted else None, "notes": notes}
        rows = [asdict(line) for line in lines]
        sys.stdout.write(json.dumps({**data, "nodes": rows}, indent=1) + "\n")
    else:
        sys.stdout.write("\n".join(_text(notes, lines, limit)))


def _chosen_for(package: Compiled, given: Mapping[str, int], others: bool) -> list[str]:
    """What providers were chosen for, where that is not what is shown; `others` are times of another profile."""
    asked = {dim: size for dim, size in recipe_sizes(package.manifest).items() if dim in given}
    if not others and asked.items() <= given.items():
        return []
    at = f" for {', '.join(f'{dim}={size}' for dim, size in asked.items())}" if asked else ""
    by = profile_of(package).name
    return [f"providers were chosen{at} by profile {by}: where a runner-up is ahead here, it was not there"]


def profile_of(package: Compiled) -> Profile:
    """The profile that a package was compiled with, which it holds. Raises PackageError where it does not."""
    file = package.path / PROFILE
    if not file.is_file():
        raise PackageError(
            "the package does not hold the profile it was compiled with", str(file), "compile it again, or --rates h100"
        )
    return read_profile(str(file))


def forecast(package: Compiled, profile: Profile, given: Mapping[str, int], entries: Sequence[str]) -> list[Line]:
    """What each node of some entries takes on one rank, function by function."""
    module = package.snapshots[-1].module
    gpu = bool(package.manifest.get("providers"))
    providers = Providers(module, profile, extents(module, given), gpu=gpu, sizes=declared_sizes(module))
    chosen = {(p["function"], p["node"]): p["provider"] for p in package.manifest.get("providers", ())}
    numbers = {
        (function, node): int(number)
        for function, listed in package.manifest.get("lines", {}).items()
        for number, node in reversed(listed.items())
    }
    calls = call_counts(module, entries)
    found = []
    for name, count in calls.items():
        function = module.functions[name]
        for node, part, totals in _working(function, bool(numbers), numbers):
            choice = providers.choice(part, totals[0] if totals else None)
            line = _line(function, node, part, choice, chosen, profile, totals)
            if line.provider == NCCL and line.microseconds is not None:
                line = replace(line, microseconds=round(line.microseconds * _sent(module, node), 3))
            found.append(replace(line, calls=count, step_line=numbers.get((name, node.id))))
    return found


def _sent(module: Module, node: Node) -> float:
    """The part of its tensors that a rank sends in a collective: nothing along an axis of one, or of no known size."""
    known, name = declared_sizes(module), str(node.attrs.get("axis", ""))
    axis = next((axis for axis in module.mesh if axis.name == name), None)
    ranks = math.prod(known.get(part, 1) for part in (axis.of or (name,))) if axis is not None else 1
    return (ranks - 1) / ranks


def call_counts(module: Module, entries: Iterable[str]) -> dict[str, int]:
    """How often each function runs where each entry runs once; callers before callees."""
    counts: Counter[str] = Counter()

    def visit(name: str, times: int) -> None:
        counts[name] += times
        for callee, number in Counter(called(n) for n in module.functions[name].nodes if n.op == "call").items():
            visit(callee, times * number)

    for entry in entries:
        visit(module.entries[entry].function, 1)
    return dict(counts)


def _working(
    function: Function, known: bool, numbers: Mapping[tuple[str, str], int]
) -> Iterator[tuple[Node, Node, Sequence[Value]]]:
    """Nodes that do something; a product that is added to totals as it is made stands with the sum as one node."""
    makers = function.producers()
    absorbed: dict[Node, Node] = {}
    for node in function.nodes:
        part = makers.get(node.operands[-1]) if node.op in ADDING else None
        if part is not None and len(part.results) == 1 and absorbable(part, node.operands[0]):
            apart = (function.name, part.id) in numbers if known else False
            absorbed |= {} if apart else {node: part}
    for node in function.nodes:
        if node.op not in _IDLE and node not in absorbed.values():
            part = absorbed.get(node, node)
            yield node, part, node.operands[:-1] if part is not node else ()


def _line(
    function: Function,
    node: Node,
    part: Node,
    choice: Choice,
    chosen: Mapping[tuple[str, str], str],
    profile: Profile,
    totals: Sequence[Value],
) -> Line:
    provider = chosen.get((function.name, part.id), choice.chosen.provider)
    instance = choice.instance
    if totals:  # the result is never written, the totals are read and written
        instance = replace(instance, bytes=instance.bytes + sum(_bytes(total, instance.bytes) for total in totals))
    time = profile.time(instance, provider)
    other = next((c for c in choice.candidates if c.provider != provider), None)
    return Line(
        function.name,
        node.id,
        part.op.removesuffix("_") + " +=" * bool(totals),
        1,
        provider,
        round(time.microseconds, 3),
        time.basis,
        instance.bytes,
        other.provider if other else "",
        round(profile.time(instance, other.provider).microseconds, 3) if other else None,
        dict(choice.refused),
        str(part.origin) if part.origin.file else "",
        None,
    )


def _bytes(total: Value, most: int) -> int:
    """What a sum in place moves beyond the product alone: the total, read once more, where its size is known."""
    numel = total.tensor.numel
    return min(most, numel * total.tensor.dtype.bits // 8) if isinstance(numel, int) else 0


def joined(lines: list[Line], times: Times) -> tuple[list[Line], float]:
    """The lines with what was measured, and who ran it; and the microseconds a step that belong to none of them."""
    left = dict(times.microseconds)
    made = []
    for line in lines:
        place = line.function, line.node
        line = replace(line, measured_microseconds=left.pop(place, 0.0) / line.calls)
        if times.twins is not None:  # what is said of other providers is of a GPU
            ran = TWIN if place in times.twins else TORCH
            line = replace(line, provider=ran, runner_up="", runner_up_microseconds=None, refused={})
        made.append(line)
    return made, sum(left.values())


def _text(notes: Sequence[str], lines: list[Line], limit: int) -> Iterator[str]:
    yield "\n".join(notes) + "\n"
    measured = any(line.measured_microseconds is not None for line in lines)
    predicted = any(line.microseconds is not None for line in lines)
    totals = sorted(_totals(lines, lambda line: f"@{line.function}"), key=lambda row: -row[2])
    for name, _, _ in totals:
        own = sorted((n for n in lines if f"@{n.function}" == name), key=lambda line: (-line.total, -line.bytes))
        times = (*(["us"] if predicted else []), *(["measured"] if measured else []))
        header = ("node", "op", "provider", *times, "bytes", "runner-up", "source")
        rows = [_row(line) for line in own[:limit]]
        more = f"… and {len(own) - limit} more (--limit)\n" if len(own) > limit else ""
        took = f": {sum(line.total for line in own):.1f} us" if times else ""
        yield f"{name}, {own[0].calls} a step{took}\n{table(header, rows)}{more}"
    whole = sum(line.total for line in lines)

    def row(name: str, number: int, us: float) -> tuple[str, ...]:
        return (name, str(number), *((f"{us:.1f}", f"{us / whole:.1%}") if whole else ("", "")))

    rows = [row(*total) for total in totals]
    kinds = sorted(_totals(lines, lambda line: f"{line.op}, {line.provider}"), key=lambda row: -row[2])
    rows += [("", "", "", ""), *(row(*kind) for kind in kinds[:limit])]
    rows += [(f"… and {len(kinds) - limit} more (--limit)", "", "", "")] * (len(kinds) > limit)
    yield table(("a step", "nodes", "us", "share"), [*rows, row("in all", len(lines), whole)])
    if refused := {(line.op, name, reason) for line in lines for name, reason in line.refused.items()}:
        yield table(("op", "not by", "because"), sorted(refused))


def _row(line: Line) -> tuple[str, ...]:
    mark = "" if line.basis == "measured" else "~"
    other = "" if line.runner_up_microseconds is None else f"{line.runner_up} {line.runner_up_microseconds:.1f}"
    times = [] if line.microseconds is None else [f"{line.microseconds:.1f}{mark}"]
    times += [] if line.measured_microseconds is None else [f"{line.measured_microseconds:.1f}"]
    return (f"%{line.node}", line.op, line.provider, *times, size_text(line.bytes), other, line.source)


def _totals(lines: Iterable[Line], name: Any) -> Iterator[tuple[str, int, float]]:
    groups: dict[str, list[Line]] = {}
    for line in lines:
        groups.setdefault(name(line), []).append(line)
    for key, group in groups.items():
        yield key, len(group), sum(line.total for line in group)
