"""From a recipe to a package: capture, run the pipeline, emit."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mgraph.capture import CaptureReport, ModelSpec, capture_with_report
from mgraph.ir.graph import Module
from mgraph.ir.types import DType
from mgraph.passes.instrument import Instrument, OpCounts, Snapshots, Timer, VerifyEach
from mgraph.passes.pipeline import PassResult, parse_pipeline, run_pipeline
from mgraph.passes.spec import print_value
from mgraph.recipe import Recipe

NORMALIZE = "outline,canonicalize,constant-fold,cse,dce"
RAISE = "raise-norm,raise-rope,raise-attention,raise-glu,raise-moe,raise-loss,cse,dce"
_DTYPES = {"fp32": DType.F32, "bf16": DType.BF16}


@dataclass(slots=True)
class Compilation:
    """What a compilation gave: the final module, what each pass did, the snapshots, and seconds per stage."""

    module: Module
    capture: CaptureReport
    results: list[PassResult]
    snapshots: Snapshots
    seconds: dict[str, float] = field(default_factory=dict)
    package: Path | None = None


def pipeline_text(recipe: Recipe) -> str:
    """The pipeline that a recipe means."""
    if recipe.purpose == "serve":
        return f"{NORMALIZE},{RAISE},derive-serve{{max_length={recipe.max_length}}},cse,dce,in-place"
    options = ",".join(f"{n}={getattr(recipe, n)!r}" for n in ("beta1", "beta2", "eps", "weight_decay", "max_norm"))
    derive = f"autodiff,recompute{{mode={print_value(recipe.recompute)}}},adamw{{{options}}}"
    shard = "".join(f"data-parallel{{axis={axis},size={size or 0}}}," for axis, size in recipe.mesh_axes().items())
    return f"{NORMALIZE},{RAISE},{derive},{shard}cse,dce,in-place"


def build_module(
    recipe: Recipe, extra: tuple[Instrument, ...] = (), say: Callable[[str], Any] = lambda _: None
) -> Compilation:
    """Capture a model and run its pipeline; nothing is written. `say` hears what happens, a line at a time."""
    spec = ModelSpec(
        recipe.model,
        dtype=_DTYPES[recipe.precision],
        position_ids=recipe.position_ids,
        loss_mask=recipe.loss_mask,
        max_length=recipe.max_length or None,
    )
    pipeline = parse_pipeline(pipeline_text(recipe))
    say(f"capturing {recipe.model}")
    module, captured = capture_with_report(spec)
    begun = time.perf_counter()
    snapshots = Snapshots()
    instruments = (VerifyEach(), Timer(), OpCounts(), snapshots, *extra)
    module, results = run_pipeline(module, pipeline, instruments, disable=recipe.patterns())
    seconds = {"capture": captured.total_seconds, "passes": time.perf_counter() - begun}
    return Compilation(module, captured, results, snapshots, seconds)
