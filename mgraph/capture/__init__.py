"""Capture: from a model definition to a `Module` with one entry, `forward`.

resolve (source) -> build (initialise, recorder) -> export (adapter, probe, replay)
-> import (unsupported, shapes, rules, mutation) -> the longest sequence (position_tables)

A model that draws random numbers while it is trained (dropout, noise) is traced a second time in evaluation mode: the
entry `evaluation` has the same outputs.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

from mgraph.capture.export import export
from mgraph.capture.importer import import_program
from mgraph.capture.initialise import build
from mgraph.capture.position_tables import with_bounded_length
from mgraph.capture.source import ModelSpec, resolve
from mgraph.capture.weight_layout import CheckpointForm, checkpoint_form
from mgraph.ir.dims import NamedDim
from mgraph.ir.graph import Entry, Module, Value
from mgraph.ir.ops.random import STATES

__all__ = ["CaptureReport", "Captured", "CheckpointForm", "ModelSpec", "capture", "capture_with_report"]


@dataclass(frozen=True)
class CaptureReport:
    """What a capture did: seconds of each step, nodes that torch traced and that the module has, what was left out, and
    a line on each list of layers: how many were traced, and why not fewer."""

    seconds: dict[str, float]
    traced_nodes: int
    nodes: int
    dropped: dict[str, int]
    layers: tuple[str, ...] = ()

    @property
    def total_seconds(self) -> float:
        """Seconds of all steps."""
        return sum(self.seconds.values())


class Captured(NamedTuple):
    """What a capture gave: the module, what was done for it, and the form of the model's checkpoints."""

    module: Module
    report: CaptureReport
    form: CheckpointForm


def capture(spec: ModelSpec | str) -> Module:
    """Capture a model: one function and one entry `forward`, inputs -> loss_sum f32[], count i64[], logits (two where
    evaluation differs from training).

    `spec` is a `ModelSpec` or its text. Raises ModelError (the model cannot be found or built) or CaptureError (it
    cannot be traced), both with the user's source line; OptionError where it has not the positions of its `max_length`.
    """
    return capture_with_report(spec).module


def capture_with_report(spec: ModelSpec | str, replay: bool = True) -> Captured:
    """As `capture`, with the report and the form of checkpoints.

    With `replay`, layers that do the same are traced once; without, each is. The module is the same.
    """
    spec = ModelSpec(spec) if isinstance(spec, str) else spec
    times = [time.perf_counter()]
    with _no_garbage_collection():
        source = resolve(spec)
        built = build(source.factory, source.where)
        form = checkpoint_form(built.module, list(built.inits), source.configuration)
        times.append(time.perf_counter())
        exported = export(built.module, spec, source.inputs, source.loss, source.where, replay)
        times.append(time.perf_counter())
        module, dropped = import_program(exported, built, source.name)
        if spec.training and not STATES.keys().isdisjoint(module.state):
            evaluating = replace(spec, training=False)
            evaluation = export(built.module, evaluating, source.inputs, source.loss, source.where, replay)
            module = _with_evaluation(module, import_program(evaluation, built, source.name)[0])
        module = with_bounded_length(module, spec.max_length)
        times.append(time.perf_counter())
    seconds = {
        name: after - before
        for name, before, after in zip(("build", "export", "import"), times, times[1:], strict=False)
    }
    report = CaptureReport(
        seconds,
        exported.traced_nodes,
        len(module.functions["forward"].nodes),
        dict(sorted(dropped.items())),
        exported.layers,
    )
    return Captured(module, report, form)


def _with_evaluation(module: Module, other: Module) -> Module:
    """The module with the function of another capture of the same model as its entry `evaluation`.

    Constants that both captures made under one name, with different values, are told apart.
    """
    states = dict(module.state)
    values: dict[Value, Value] = {}
    for name, state in other.state.items():
        same = module.state.get(name)
        if same is not None and same.init != state.init:
            name, same = f"{name}.evaluation", None
        if same is None:
            states[name] = replace(state, value=Value(name, state.type, is_state=True))
        values[state.value] = states[name].value
    function = other.functions["forward"]
    nodes = tuple(replace(n, operands=tuple(values.get(v, v) for v in n.operands)) for n in function.nodes)
    results = tuple(values.get(v, v) for v in function.results)
    return replace(
        module,
        dims={n: _narrower(dim, other.dims.get(n, dim)) for n, dim in module.dims.items()},
        state=states,
        functions={
            **module.functions,
            "evaluation": replace(function, name="evaluation", nodes=nodes, results=results),
        },
        entries={
            **module.entries,
            "evaluation": Entry("evaluation", "evaluation", other.entries["forward"].outputs),
        },
    )


def _narrower(one: NamedDim, two: NamedDim) -> NamedDim:
    """The extents that both allow."""
    bounds = [d.maximum for d in (one, two) if d.maximum is not None]
    return replace(one, minimum=max(one.minimum, two.minimum), maximum=min(bounds, default=None))


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
