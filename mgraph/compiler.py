"""From a recipe to a package: capture, run the pipeline, emit.

`compile_package` is what `mgraph compile` calls; `build_module` stops before anything is written.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mgraph.adapters import parse_adapter
from mgraph.capture import CaptureReport, CheckpointForm, ModelSpec, capture_with_report
from mgraph.codegen.kernel_sites import kernel_sites
from mgraph.codegen.package import PackageInfo, check_target, emit_package, what_is_there
from mgraph.codegen.profile import Profile, read_profile
from mgraph.codegen.providers import parse_providers
from mgraph.codegen.triton.builder import KernelBuilder
from mgraph.errors import OptionError
from mgraph.ir.collective_proof import prove
from mgraph.ir.graph import Module
from mgraph.ir.types import DType
from mgraph.memory_budget import fitted
from mgraph.parameter_groups import parse_group
from mgraph.passes.base import Report
from mgraph.passes.instrument import Instrument, OpCounts, Snapshots, Timer, VerifyLater
from mgraph.passes.lora import Lora
from mgraph.passes.pad import Pad
from mgraph.passes.pipeline import (
    NORMALIZE,
    PassResult,
    Pipeline,
    check_order,
    parse_pipeline,
    print_pipeline,
    run_pipeline,
    select,
)
from mgraph.passes.spec import OptionValue, print_spec
from mgraph.passes.verify import TwinCheck
from mgraph.recipe import MESH_AXES, Recipe
from mgraph.serving_plan import serving_plan

RAISE = "raise-norm,raise-rope,raise-attention,raise-glu,raise-moe,raise-loss,cse,dce"
FUSE, REGIONS = "fuse-rope,fuse-residual,fuse-norm,fuse-loss,fuse-experts,fuse-products,", "fuse-regions,"
"""What is fused for GPUs: into ops that have a name, and what is left."""
TIMES = "compilation.json"
"""The file in a package's graphs/ that keeps the seconds of each stage and the capture's report."""
_SHARDING = ("dp", "ep", "tp", "fsdp")
"""The axes in the order of their passes: what is sharded is what tensor parallelism leaves of a tensor."""
_DTYPES = {"fp32": DType.F32, "bf16": DType.BF16, "fp16": DType.F16}
_ADAMW = ("beta1", "beta2", "eps", "weight_decay", "max_norm", "optimizer")


@dataclass(slots=True)
class Compilation:
    """What a compilation gave: the final module, what each pass did, the snapshots, and seconds per stage; `form` is
    that of the model's checkpoints."""

    module: Module
    capture: CaptureReport
    form: CheckpointForm
    results: Sequence[PassResult]
    snapshots: Snapshots
    seconds: dict[str, float] = field(default_factory=dict)
    twin: str = ""
    """With `verify`: how the twin that the passes were checked on is smaller than the model."""
    recipe: Recipe = field(default_factory=Recipe)
    """What was compiled: of a memory budget, what was chosen."""
    fit: tuple[str, ...] = ()
    """With a memory budget: the plan that was chosen, and those that were looked at."""
    serving: tuple[str, ...] = ()
    """Of a package for serving: its CUDA graphs, and its memory."""
    package: Path | None = None

    def write_graphs(self, directory: Path) -> str:
        """Write the snapshots, the reports and the seconds of each stage; the text of the last graph."""
        text = self.snapshots.write(directory)
        times = {
            "seconds": self.seconds,
            "capture": dataclasses.asdict(self.capture),
            "twin": self.twin,
            "fit": self.fit,
        }
        (directory / TIMES).write_text(json.dumps(times, indent=1) + "\n", encoding="utf-8")
        return text


def pipeline_text(recipe: Recipe) -> str:
    """The pipeline that a recipe means, before passes are left out."""
    if recipe.purpose == "serve":
        # Nothing drops out of what is served.
        rules = tuple(dataclasses.replace(parse_adapter(rule), dropout=0.0).text for rule in recipe.lora)
        adapt = print_spec("lora", {"rules": rules}) + "," if rules else ""
        derive = print_spec("derive-serve", {"max_length": recipe.max_length, "block_size": recipe.block_size})
        fuse = (
            "fuse-append,canonicalize,dce,fuse-rope,fuse-norm,skip-padding,"
            f"{print_spec('fuse-experts', {'sums': True})},fuse-linear,fuse-regions,cse,dce,"
            if recipe.archs
            else ""
        )
        if "tp" in recipe.mesh_axes():
            adapt += print_spec("repeat-heads", {"size": recipe.mesh_axes()["tp"] or 0}) + ","
            fuse = f"{_sharding(recipe, 'tp')},cse,dce,{fuse}"
        return f"{NORMALIZE},{RAISE},{adapt}{derive},canonicalize,cse,dce,{fuse}in-place"
    frozen = [rule for rule in recipe.groups if parse_group(rule).frozen]
    optimizer = {n: getattr(recipe, n) for n in (*_ADAMW, "groups")} | {"check": recipe.check_finite}
    scaled: dict[str, OptionValue] = {"low_sums": recipe.grad_dtype == "param"}
    if recipe.precision == "fp16":
        scaled |= {"loss_scale": recipe.loss_scale}
        optimizer |= {n: getattr(recipe, f"loss_scale_{n}") for n in ("growth", "backoff", "interval")}
    again: dict[str, OptionValue] = {
        "mode": recipe.recompute,
        "budget": recipe.kept_budget,
        "batch": recipe.batch,
        "seq": recipe.seq,
    }
    specs = [print_spec("lora", {"rules": recipe.lora, "train": recipe.lora_train})] if recipe.lora else []
    specs += [print_spec("freeze", {"groups": recipe.groups})] if frozen else []
    if (ranks := recipe.mesh_axes().get("tp")) and ranks > 1:
        specs += [print_spec("pad", {"size": ranks, **dict.fromkeys(recipe.padded, True)})] if recipe.pad else []
        specs += [print_spec("repeat-heads", {"size": ranks})]
    specs += ["replayable-routing"] if recipe.replayable_routing else []
    specs += ["pad-to-capacity"] if recipe.pad_to_capacity else []
    if recipe.expert_ranks > 1:
        ways: dict[str, OptionValue] = {"size": recipe.expert_ranks, "chunks": recipe.ep_chunks}
        ways |= {"exact": True} if recipe.expert_extent == "host" else {}
        specs += [print_spec("expert-dispatch", ways)]
    joint = recipe.loss_axes or recipe.router_loss_counts == "local"  # of no axes: it refuses what has no losses
    specs += [print_spec("joint-losses", {"over": recipe.loss_axes})] if joint else []
    specs += [print_spec("autodiff", scaled), print_spec("recompute", again), print_spec("adamw", optimizer)]
    counted: dict[str, OptionValue] = {"rate": recipe.expert_bias_rate, "report": recipe.expert_load}
    specs += [print_spec("expert-bias", counted)] if recipe.expert_bias_rate or recipe.expert_load else []
    if recipe.expert_ranks > 1 and recipe.expert_budget:
        specs += [print_spec("expert-budget", {"size": recipe.expert_ranks})]
    derive = ",".join(specs)
    shard = ""
    for axis in (axis for axis in _SHARDING if axis in recipe.mesh_axes()):
        shard += f"{_sharding(recipe, axis)},"
        if recipe.expert_ranks > 1 and axis == recipe.expert_axes()[-1]:
            over: dict[str, OptionValue] = {"over": recipe.expert_axes(), "gather": recipe.dispatch == "allgather"}
            over |= {"budget": recipe.expert_budget} if recipe.expert_budget else {}
            shard += print_spec("expert-parallel", over) + ","
    schedule = "overlap-experts," if recipe.expert_ranks > 1 else ""
    schedule += "overlap-gradients," if recipe.overlap else ""
    schedule += "write-gradients," if recipe.one_microbatch else ""
    schedule += "dce,join-products," if recipe.archs else ""
    schedule += "late-gradients," if recipe.archs and recipe.expert_ranks > 1 else ""
    fuse, update = (FUSE, "overlap-update,fuse-squares,") if recipe.archs else ("", "")
    replayed = recipe.archs and recipe.cuda_graphs != "off"
    graphs = "," + print_spec("cuda-graphs", {"layers": recipe.cuda_graphs == "layers"}) if replayed else ""
    if recipe.loss_budget:
        fuse = (fuse or "fuse-loss,") + print_spec("chunk-loss", {"budget": recipe.loss_budget}) + ","
    fuse += REGIONS if recipe.archs else ""
    away = ""
    if recipe.offloaded:
        options: dict[str, OptionValue] = {"batch": recipe.batch, "seq": recipe.seq, "limit": recipe.offload_limit}
        away = print_spec("offload", {**dict.fromkeys(recipe.offloaded, True), **options}) + ","
    return f"{NORMALIZE},{RAISE},{derive},{shard}by-layer,{fuse}{schedule}cse,dce,{away}{update}in-place{graphs}"


def _sharding(recipe: Recipe, axis: str) -> str:
    """The pass of a mesh axis."""
    options: dict[str, OptionValue] = {"axis": axis, "size": recipe.mesh_axes()[axis] or 0}
    if recipe.expert_ranks > 1 and axis in recipe.expert_axes():
        options["experts"] = True
    if axis in recipe.placements():
        options["place"] = recipe.placements()[axis]
    if axis == "tp":
        options["sequence"] = recipe.sequence_parallel
    if axis == "fsdp":
        options |= {"level": recipe.zero, "reshard": not recipe.keep_gathered, "wide": recipe.wide_sums}
    return print_spec(MESH_AXES[axis], options)


def pipeline_of(recipe: Recipe) -> Pipeline:
    """The passes that a recipe runs. Raises PassError where it leaves out what others need, or no pass has a name."""
    passes = select(parse_pipeline(pipeline_text(recipe)), disable=recipe.patterns())
    check_order(passes, frozenset({"forward"}))
    return passes


@contextmanager
def collector_spared() -> Iterator[None]:
    """No garbage collection meanwhile: capture leaves half a million objects, which a deep graph makes the collector
    walk again and again, and graphs have no cycles that it could free."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Start(Instrument):
    """Notes when the first pass may begin: listed last, it starts after the other instruments."""

    at = 0.0

    def start(self, module: Module) -> None:
        """Note the time."""
        self.at = time.perf_counter()


LATE = ("grouped_", "moe_route_fwd")
"""Beginnings of the names of kernels that take long to compile and of which most graphs lose some to fusion."""


class KernelsAhead(Instrument):
    """Lets the kernels of each graph be compiled while the passes go on."""

    def __init__(self, builder: KernelBuilder, *, fixed: bool) -> None:
        self._builder, self._fixed = builder, fixed

    def after(self, result: PassResult, before: Module, after: Module) -> None:
        """Hand over the kernels that the pass brought in."""
        if after is not before:
            specs = kernel_sites(after, gpu=True, fixed=self._fixed).specs
            self._builder.prepare([spec for spec in specs if not spec.name.startswith(LATE)])


def build_module(
    recipe: Recipe, extra: tuple[Instrument, ...] = (), say: Callable[[str], Any] = lambda _: None
) -> Compilation:
    """Capture a model and run its pipeline; nothing is written. `say` hears what happens, a line at a time."""
    done, verifier = _run_passes(recipe, extra, say)
    verifier.check()
    prove(done.module)
    return done


def _run_passes(
    recipe: Recipe, extra: tuple[Instrument, ...], say: Callable[[str], Any]
) -> tuple[Compilation, VerifyLater]:
    """`build_module` but for the verifier, which has yet to check what the passes made."""
    pipeline_of(recipe)  # what is wrong with it is said before the capture
    spec = ModelSpec(
        recipe.model,
        dtype=_DTYPES[recipe.precision],
        training=recipe.purpose == "train",
        packed=recipe.packed,
        loss_mask=recipe.loss_mask,
        max_length=recipe.max_length or None,
    )
    say(f"capture {recipe.model}")
    module, captured, form = capture_with_report(spec)
    fit: tuple[str, ...] = ()
    if recipe.memory_budget and recipe.purpose == "train":
        say(f"fit into {recipe.memory_budget}")
        with collector_spared():
            recipe, fit = fitted(recipe, *_tried(module, recipe))
        say(fit[0])
    pipeline = pipeline_of(recipe)
    begun = time.perf_counter()
    snapshots, check, start, verifier = (
        Snapshots(),
        TwinCheck(
            ranks=recipe.mesh_axes().get("tp") or 1,
            # On the twin each axis that splits tensors has two ranks.
            parts=2
            ** sum(
                (axis != "dp" or axis in recipe.expert_axes()) and size != 1
                for axis, size in recipe.mesh_axes().items()
            ),
        ),
        Start(),
        VerifyLater(),
    )
    checks = (check,) if recipe.verify else ()
    instruments = (verifier, *checks, OpCounts(), snapshots, *extra, Timer(), start)
    with collector_spared():
        module, results = run_pipeline(module, pipeline, instruments)
    # Checking and printing what was captured belongs to the capture: it is the last work done once per layer.
    seconds = {"capture": captured.total_seconds + start.at - begun, "passes": time.perf_counter() - start.at}
    twin = str(check.reduction or check.why_not) if recipe.verify else ""
    return Compilation(module, captured, form, results, snapshots, seconds, twin, recipe, fit), verifier


def _tried(module: Module, recipe: Recipe) -> tuple[Module, Callable[[Recipe], tuple[Module, Sequence[PassResult]]]]:
    """What the passes before `recompute` make, and what runs the others, of recipes that differ from there on."""
    passes = pipeline_of(recipe)
    names = [pass_.name for pass_ in passes]
    if "recompute" not in names:
        raise OptionError("without recompute nothing can be fitted", "--memory-budget", "leave out --disable")
    shared = passes[: names.index("recompute")]
    have = check_order(shared, frozenset({"forward"}))
    base, _ = run_pipeline(module, shared)

    def compiled(given: Recipe) -> tuple[Module, Sequence[PassResult]]:
        rest = pipeline_of(given)[len(shared) :]
        return run_pipeline(base, rest, have=have)

    return base, compiled


def compile_package(
    recipe: Recipe,
    extra: tuple[Instrument, ...] = (),
    *,
    force: bool = False,
    say: Callable[[str], Any] = lambda _: None,
) -> Compilation:
    """Compile a model into a package at `recipe.directory`, whole or not at all.

    With `force`, files of an existing package that a person edited are kept as `*.edited` instead of refused. Raises
    the `MgraphError` of the stage that fails.
    """
    target = recipe.directory.absolute()
    check_target(target, force=force)
    there = what_is_there(target)
    if there not in ("", f"{recipe.model} --for {recipe.purpose}"):
        say(f"note: takes the place of the package of {there}")
    # What is wrong with either is said before the capture.
    profile, providers = read_profile(recipe.profile_name), parse_providers(recipe.provider)
    with KernelBuilder(recipe.archs) as builder:
        return _compile(recipe, extra, builder, profile, providers, force=force, say=say)


def _compile(
    recipe: Recipe,
    extra: tuple[Instrument, ...],
    builder: KernelBuilder,
    profile: Profile,
    providers: Mapping[str, str],
    *,
    force: bool,
    say: Callable[[str], Any],
) -> Compilation:
    ahead = [KernelsAhead(builder, fixed=recipe.batch_invariant)] if recipe.archs else []
    done, verifier = _run_passes(recipe, (*extra, *ahead), say)
    plan = serving_plan(recipe, done.module) if recipe.purpose == "serve" else None
    if plan is not None:
        done.serving = plan.lines()
    say("emit the package")
    begun = time.perf_counter()
    pipeline = print_pipeline(pipeline_of(done.recipe))
    verification = {
        f"{r.index:03d}_{r.name}": r.measured["verify"]["status"] for r in done.results if "verify" in r.measured
    }

    def write_graphs(directory: Path) -> str:
        """Runs while kernels are built; a wrong graph ends the emission, and the package does not come to be."""
        verifier.check()
        prove(done.module)
        return done.write_graphs(directory)

    info = PackageInfo(
        recipe.purpose,
        recipe,
        pipeline,
        recipe.archs,
        write_graphs,
        verification,
        done.form.configuration,
        done.form.layout,
        _adapters(done),
        [f"{m.function} %{m.node}: {m.detail}" for r in done.results if r.name == Pad.name for m in r.report.matches],
        profile,
        {"B": recipe.batch, "S": recipe.seq},
        providers,
        {} if plan is None else plan.facts(),
        recipe.batch_invariant,
    )
    with collector_spared():
        done.package = emit_package(done.module, info, recipe.directory, force=force, builder=builder)
    done.seconds["emit"] = time.perf_counter() - begun
    return done


def _adapters(done: Compilation) -> dict[str, dict[str, Any]]:
    """What the manifest says of the adapters, by the names of the weights that they are for."""
    # Snapshot i is the module that pass i got.
    for pass_, snapshot in zip(pipeline_of(done.recipe), done.snapshots.snapshots, strict=False):
        if isinstance(pass_, Lora):
            return {name: target.facts() for name, target in pass_.targets(snapshot.module, Report()).items()}
    return {}
