"""`mgraph compile`: shows the stages while they run, then where the time went."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mgraph.codegen.package import MANIFEST
from mgraph.codegen.triton.aot import most_shared
from mgraph.compiler import Compilation, compile_package, pipeline_of
from mgraph.errors import some_of
from mgraph.ir.graph import Module
from mgraph.passes.instrument import Instrument
from mgraph.passes.pipeline import PassResult
from mgraph.passes.verify import verify_table
from mgraph.recipe import Recipe


class _Advance(Instrument):
    """Moves the bar before every pass."""

    def __init__(self, bar: Progress, task: object) -> None:
        self.bar, self.task = bar, task

    def before(self, result: PassResult, module: Module) -> None:
        """The stages behind are the capture and the passes before."""
        self.bar.update(self.task, completed=result.index, description=result.name)  # type: ignore[arg-type]


def run(recipe: Recipe, force: bool) -> None:
    """Compile, and print the package's directory on stdout."""
    stages = len(pipeline_of(recipe)) + 2
    # Line wrapping would cut messages of a terminal that is not there.
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task("capture", total=stages)

        def say(stage: str) -> None:
            completed = stages - 1 if stage.startswith("emit") else 0
            bar.update(task, completed=completed, description=stage)
            if not console.is_terminal:
                print(stage, file=sys.stderr)

        done = compile_package(recipe, (_Advance(bar, task),), force=force, say=say)
    assert done.package is not None
    for line in (*report_lines(done), *unfit_lines(done.package)):
        print(line, file=sys.stderr)
    here = Path.cwd()
    print(done.package.relative_to(here) if done.package.is_relative_to(here) else done.package)


def unfit_lines(package: Path) -> list[str]:
    """A line for each architecture whose GPUs have not the shared memory that kernels of a package ask for."""
    unfit: dict[str, list[str]] = {}
    for kernel in json.loads((package / MANIFEST).read_text(encoding="utf-8"))["kernels"]:
        for binary in (binary for launch in kernel["launches"] for binary in launch["binaries"]):
            arch, names = binary["arch"], unfit.setdefault(binary["arch"], [])
            if binary["shared"] > most_shared(arch) and kernel["name"] not in names:
                names.append(kernel["name"])
    return [
        f"note: {some_of(names)}: not enough shared memory on {arch}, their twins run there, op by op"
        for arch, names in unfit.items()
        if names
    ]


def report_lines(done: Compilation) -> list[str]:
    """Seconds of each stage: the capture apart, each pass with its share of all passes, the emission."""
    captured = done.capture
    parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in captured.seconds.items())
    in_passes = sum(result.measured["seconds"] for result in done.results)
    lines = [f"{'capture':<18}{captured.total_seconds:8.3f} s        {parts}; {captured.nodes} nodes"]
    lines += [f"  {line}" for line in captured.layers]
    for result in done.results:
        seconds = result.measured["seconds"]
        lines.append(f"  {result.name:<16}{seconds:8.3f} s {seconds / in_passes:5.0%}  {_summary(result)}".rstrip())
    lines += (*done.fit[1:], *done.serving)
    if done.twin:
        lines += ["", f"every pass on the reduced twin: {done.twin}", *verify_table(done.results).splitlines(), ""]
    lines.append(f"{'passes':<18}{in_passes:8.3f} s")
    lines.append(f"{'checks, graphs':<18}{done.seconds['passes'] - in_passes:8.3f} s")
    lines.append(f"{'emit':<18}{done.seconds['emit']:8.3f} s")
    return lines


def _summary(result: PassResult) -> str:
    """What the pass did, in a few words."""
    if not result.changed:
        return "no change"
    report = result.report
    words = [f"{name} {number}" for name, number in report.counts.items()]
    if not words and report.matches:
        words = [f"matches {len(report.matches)}"]
    if report.near_misses:
        words.append(f"near misses {len(report.near_misses)}")
    return ", ".join(words)
