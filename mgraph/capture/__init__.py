"""Capture: from a model definition to a `Module` with one entry, `forward`.

resolve (source) -> build (initialise, recorder) -> export (adapter) -> import (unsupported, shapes, rules, mutation)
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mgraph.capture.export import export
from mgraph.capture.importer import import_program
from mgraph.capture.initialise import build
from mgraph.capture.source import ModelSpec, resolve
from mgraph.ir.graph import Module

__all__ = ["CaptureReport", "ModelSpec", "capture", "capture_with_report"]


@dataclass(frozen=True)
class CaptureReport:
    """What a capture did: seconds of each step, nodes that torch traced and that the module has, what was left out."""

    seconds: dict[str, float]
    traced_nodes: int
    nodes: int
    dropped: dict[str, int]

    @property
    def total_seconds(self) -> float:
        """Seconds of all steps."""
        return sum(self.seconds.values())


def capture(spec: ModelSpec | str) -> Module:
    """Capture a model: one function and one entry `forward`, inputs -> loss_sum f32[], count i64[], logits.

    `spec` is a `ModelSpec` or its text. Raises ModelError (the model cannot be found or built) or CaptureError (it
    cannot be traced), both with the user's source line.
    """
    return capture_with_report(spec)[0]


def capture_with_report(spec: ModelSpec | str) -> tuple[Module, CaptureReport]:
    """As `capture`, with the report."""
    spec = ModelSpec(spec) if isinstance(spec, str) else spec
    times = [time.perf_counter()]
    with _no_garbage_collection():
        source = resolve(spec)
        built = build(source.factory, source.where)
        times.append(time.perf_counter())
        exported = export(built.module, spec, source.inputs, source.loss, source.where)
        times.append(time.perf_counter())
        module, dropped = import_program(exported, built, source.name)
        times.append(time.perf_counter())
    seconds = {
        name: after - before
        for name, before, after in zip(("build", "export", "import"), times, times[1:], strict=False)
    }
    report = CaptureReport(
        seconds,
        len(exported.program.graph.nodes),
        len(module.functions["forward"].nodes),
        dict(sorted(dropped.items())),
    )
    return module, report


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A trace makes millions of objects that all live to its end; looking for garbage takes a sixth of it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
