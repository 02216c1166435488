"""What the nodes of a package take on a GPU, measured, beside what was predicted of them.

    python3 -m benchmarks.gpu.profiled PACKAGE RESULTS.jsonl [--steps 3]

A train package runs some steps under a profiler, launched op by op, at the sizes that it was compiled for, as
`mgraph kernels PACKAGE --profile` has it; the time of each kernel belongs to the statement of step.py that launched it,
and so to a node. `ours` is what all nodes take a step, each as often as it runs: time of kernels, without gaps between
them. `attributed` is their share of the time of all kernels, `nodes` how many were seen to take any, `predicted` what
all take in seconds by the profile that the package was compiled with, and `largest` has the nodes that take most, in
seconds a step. Exit status 1 where less than `ATTRIBUTED` belongs to nodes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import rows
from mgraph.cli.kernel_times import Times, step_times
from mgraph.cli.kernels import STEP, Line, forecast, joined, profile_of
from mgraph.cli.memory import wanted_sizes
from mgraph.cli.snapshots import has_kernels, open_package
from mgraph.errors import MgraphError, PackageError

ATTRIBUTED = 0.98
LARGEST = 10


def profiled(path: Path, device: str, steps: int) -> tuple[dict[str, Any], list[str]]:
    """The row of a package, and complaints. Raises MgraphError for what cannot be profiled."""
    package = open_package(path)
    if not has_kernels(package.manifest):
        raise PackageError("no kernels for a GPU in this package", str(path), "compile it with --target h100")
    sizes = wanted_sizes(package, {})
    profile = profile_of(package)
    times = step_times(package, sizes, device, steps)
    lines, other = joined(forecast(package, profile, sizes, STEP), times)
    workload = " ".join([path.resolve().name, *(f"{name}{size}" for name, size in sizes.items())])
    made = reduced(workload, lines, other)
    if made["attributed"] >= ATTRIBUTED:
        return made, []
    return made, [f"{made['attributed']:.1%} of the time belongs to nodes; not that of {left_over(lines, times)}"]


def reduced(workload: str, lines: Sequence[Line], other: float) -> dict[str, Any]:
    """The row of measured lines; `other` are microseconds a step that belong to none."""
    ours = sum(line.total for line in lines)
    largest = sorted(lines, key=lambda line: -line.total)[:LARGEST]
    return rows.row(
        "profile",
        workload,
        ours / 1e6,
        "seconds",
        attributed=ours / (ours + other) if ours else 0.0,
        nodes=sum(line.total > 0 for line in lines),
        predicted=sum(map(predicted_seconds, lines)),
        largest=[node(line) for line in largest],
    )


def predicted_seconds(line: Line) -> float:
    """Of all calls of a node in a step."""
    return (line.microseconds or 0.0) * line.calls / 1e6


def node(line: Line) -> dict[str, Any]:
    """What a row says of a node."""
    return {
        "node": f"@{line.function} %{line.node}",
        "op": line.op,
        "provider": line.provider,
        "source": line.source,
        "seconds": line.total / 1e6,
        "predicted_seconds": predicted_seconds(line),
    }


def left_over(lines: Sequence[Line], times: Times) -> str:
    """Where most of the time goes that belongs to no node."""
    known = {(line.function, line.node) for line in lines}
    places = sorted((-time, *place) for place, time in times.microseconds.items() if place not in known)
    return ", ".join(
        f"{f'%{name} of @{function}' if function else f'line {name}'} ({-time:.0f} us)"
        for time, function, name in places[:3]
    )


def said(row: Mapping[str, Any]) -> str:
    """A row in lines."""
    lines = [
        f"{row['workload']}: {row['ours'] * 1e3:.3f} ms a step, predicted {row['predicted'] * 1e3:.3f}, of "
        f"{row['nodes']} nodes, {row['attributed']:.2%} of all"
    ]
    for one in row["largest"]:
        times = f"{one['seconds'] * 1e6:9.1f} us, predicted {one['predicted_seconds'] * 1e6:9.1f}"
        lines.append(f"  {times}  {one['op']}, {one['provider']}  {one['source']}")
    return "\n".join(lines)


def main() -> int:
    """One row of results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps is at least 1")
    rows.gpu()
    row, complaints = profiled(options.package, "cuda", options.steps)
    rows.append(options.results, row)
    print("\n".join([said(row), *complaints]), flush=True)
    return bool(complaints)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MgraphError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
