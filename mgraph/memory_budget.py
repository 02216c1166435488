"""Makes a step fit into a budget of memory: what the backward computes again, and what waits on the host.

A plan is tried by running the passes from `recompute` on and predicting the peak of a rank (`codegen/memory.py`). Of
the plans that fit, the one that is predicted to cost least is taken:

    recompute      operations and bytes that are added, at the rate of an H100's matrix products
    activations    what copies take beyond the forward that hides them there, and the backward that hides them back
    optimizer      its state there and back once a step, both ways at a time; nothing hides it

What the recipe says itself stays: a mode of recomputation, and what `offload` names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from mgraph.codegen.memory import RankMemory
from mgraph.errors import OptionError
from mgraph.ir.collectives import CollectiveOrder
from mgraph.ir.dims import evaluate
from mgraph.ir.graph import Module, Phase, StateKind
from mgraph.ir.local import declared_sizes
from mgraph.ir.mesh import mesh_sizes
from mgraph.passes.activations import extents, held_bytes
from mgraph.passes.pipeline import PassResult
from mgraph.passes.recompute import size_text
from mgraph.recipe import Recipe

FLOPS_PER_SECOND = 6e14
"""What products reach of an H100's bf16 rate."""
HOST_BYTES_PER_SECOND = 50e9
"""One way, between pinned memory and the GPU."""
_ON_HOST = (StateKind.MASTER, StateKind.MOMENT)
_ATTEMPTS = 4
"""How often the budget of kept activations is corrected."""

Compiled = Callable[[Recipe], tuple[Module, Sequence[PassResult]]]
"""Runs the passes of a recipe that has no budget."""


@dataclass(frozen=True)
class Trial:
    """Makes plans; `held` are the bytes between forward and backward where nothing is computed again."""

    compiled: Compiled
    held: int


@dataclass(frozen=True)
class Plan:
    """A recipe without a budget, the predicted memory of a rank in bytes, on the device and on the host, the seconds
    that a step takes longer, and the bytes that are held between forward and backward. `hidden` are the bytes that can
    be copied while the forward of a layer runs, and `state_seconds` what it costs to have the optimizer's state on the
    host."""

    recipe: Recipe
    peak: int
    host: int
    seconds: float
    held: int
    hidden: int = 0
    state_seconds: float = 0.0

    @property
    def text(self) -> str:
        """What it does, in words."""
        recompute, limit = self.recipe.recompute, self.recipe.offload_limit
        kept = f", {size_text(self.recipe.kept_budget)} of activations kept" if recompute == "selective" else ""
        at_most = {"activations": f"activations={size_text(limit)}"} if limit else {}
        waits = ",".join(at_most.get(what, what) for what in self.recipe.offloaded)
        return f"recompute {recompute}{kept}; offload {waits or 'none'}"

    @property
    def line(self) -> str:
        """What it does and costs."""
        host = f", {size_text(self.host)} on the host" if self.host else ""
        return f"{self.text}: {size_text(self.peak)}{host}, {self.seconds * 1e3:.1f} ms more a step"


def fitted(recipe: Recipe, base: Module, compiled: Compiled) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe that fits, and a line for what was chosen and for each plan that was looked at; `base` is what the
    passes before `recompute` made.

    Raises OptionError where nothing fits, with what was looked at and the least that would.
    """
    budget = recipe.budget
    held = held_bytes(base, {"B": recipe.batch, "S": recipe.seq})
    plans = list(_plans(replace(recipe, memory_budget=""), budget, Trial(compiled, held)))
    fitting = [plan for plan in plans if plan.peak <= budget]
    if not fitting:
        least = min(plans, key=lambda plan: plan.peak)
        raise OptionError(
            f"a rank needs at least {size_text(least.peak, up=True)} with {recipe.batch} sequences of {recipe.seq} "
            f"tokens ({least.text}), more than the budget of {size_text(budget)}; looked at: "
            + "; ".join(f"{plan.text}, {size_text(plan.peak)}" for plan in plans),
            where="--memory-budget",
            hint=f"--memory-budget {size_text(least.peak, up=True)}, a smaller --batch or --seq, or more ranks"
            + ("" if recipe.chunk_loss else ", or --chunk-loss 512MiB where logits are large"),
        )
    chosen = min(fitting, key=lambda plan: plan.seconds)
    told = [f"{'chosen' if p is chosen else 'fits' if p in fitting else 'too large'}: {p.line}" for p in plans]
    return chosen.recipe, (f"budget {size_text(budget)}; {chosen.line}", *told)


def _plans(recipe: Recipe, budget: int, trial: Trial) -> Iterator[Plan]:
    """All that is worth a look; the first plan that fits costs nothing, and ends it."""
    first = _plan(recipe, trial)
    yield first
    if first.peak <= budget:
        return
    best = math.inf
    for offload in _offloads(recipe, first):
        if "optimizer" in offload and "optimizer" not in recipe.offloaded and first.state_seconds >= best:
            continue  # nothing hides it
        plan = first if offload == recipe.offload else _plan(replace(recipe, offload=offload), trial)
        tried = [] if plan is first else [plan]
        if plan.peak > budget and recipe.recompute == "none":
            tried += _with_recompute(plan, budget, trial)
        best = min([best, *(p.seconds for p in tried if p.peak <= budget)])
        yield from tried


def _offloads(recipe: Recipe, first: Plan) -> Iterator[str]:
    """What may wait on the host: what the recipe names, and more; of activations as much as a layer's forward hides,
    and all."""
    hidden = f"activations={first.hidden}B" if first.hidden else ""
    given = next((part for part in recipe.offload.split(",") if part.startswith("activations")), "")
    activations = [given] if given else ["", hidden, "activations"] if hidden else ["", "activations"]
    for optimizer in ("optimizer",) if "optimizer" in recipe.offloaded else ("", "optimizer"):
        for part in activations:
            yield ",".join(filter(None, (part, optimizer)))


def _with_recompute(plan: Plan, budget: int, trial: Trial) -> Iterator[Plan]:
    """Plans that compute again as little as fits, or all that can be."""
    full = _plan(replace(plan.recipe, recompute="full"), trial)
    yield full
    if full.peak > budget or plan.recipe.offload.split(",")[0] == "activations":
        return  # what waits on the host need not be made again
    kept = plan.held - (plan.peak - budget)
    for _ in range(_ATTEMPTS):
        if not full.held <= kept < plan.held:
            return
        tried = _plan(replace(plan.recipe, recompute="selective", activation_budget=f"{kept}B"), trial)
        yield tried
        if tried.peak <= budget:
            return
        # Held bytes are those of whole tensors, of which a rank of `tp` may have parts.
        ratio = max(1.0, (plan.held - tried.held) / max(1, plan.peak - tried.peak))
        kept = min(kept, tried.held) - int((tried.peak - budget) * ratio) - 1


def _plan(recipe: Recipe, trial: Trial) -> Plan:
    module, results = trial.compiled(recipe)
    sizes = extents(module, {"B": recipe.batch, "S": recipe.seq})
    declared = declared_sizes(module)
    ranks = 1
    for size in declared.values():
        ranks *= size
    memory = RankMemory(module, sizes, mesh_sizes(module.mesh, {}, ranks))
    counts = next(r.report.counts for r in results if r.name == "recompute")
    host, kinds = memory.host(), memory.state()
    parts = declared.get("tp", 1)
    order, entry = CollectiveOrder(module), module.entry_function("microbatch")
    taken = dict.fromkeys(Phase, 0.0)
    for node in entry.nodes:
        taken[node.phase] += float(evaluate(order.flops(node), sizes)) / parts / FLOPS_PER_SECOND
    layers = [node for node in entry.nodes if node.op == "call" and node.phase is Phase.FORWARD]
    in_layers = sum(float(evaluate(order.flops(node), sizes)) for node in layers) / parts / FLOPS_PER_SECOND
    copied = host["activations"] / HOST_BYTES_PER_SECOND
    seconds = counts.get("cost_added", 0) / parts / FLOPS_PER_SECOND
    seconds += sum(max(0.0, copied - taken[phase]) for phase in (Phase.FORWARD, Phase.BACKWARD))
    seconds += host["state"] / HOST_BYTES_PER_SECOND
    return Plan(
        recipe,
        memory.reserved(),
        sum(host.values()),
        seconds,
        counts.get("bytes_held", trial.held),
        hidden=int(in_layers / len(layers) * HOST_BYTES_PER_SECOND) if layers else 0,
        state_seconds=sum(kinds.get(kind, 0) for kind in _ON_HOST) / HOST_BYTES_PER_SECOND,
    )
