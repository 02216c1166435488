"""Makes a step fit into a budget of memory: what the backward computes again, and what waits on the host.

A plan is tried by running the passes from `recompute` on and predicting the peak of a rank (`codegen/memory.py`). Of
the plans that fit, the one that is predicted to cost least is taken:

    recompute      operations and bytes that are added, at the rate of an H100's matrix products
    activations    what copies take beyond the forward that hides them there, and the backward that hides them back
    optimizer      its state there and back once a step, both ways at a time; nothing hides it

What the recipe says itself stays: a mode of recomputation, and what `offload` names.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from mgraph.codegen.memory import RankMemory
from mgraph.errors import OptionError
from mgraph.ir.collectives import CollectiveOrder
from mgraph.ir.dims import evaluate
from mgraph.ir.graph import Module, Phase
from mgraph.ir.local import declared_sizes
from mgraph.ir.mesh import mesh_sizes
from mgraph.passes.activations import extents
from mgraph.passes.pipeline import PassResult
from mgraph.passes.recompute import size_text
from mgraph.recipe import OFFLOADABLE, Recipe

FLOPS_PER_SECOND = 6e14
"""What products reach of an H100's bf16 rate."""
HOST_BYTES_PER_SECOND = 50e9
"""One way, between pinned memory and the GPU."""
_ATTEMPTS = 4
"""How often the budget of kept activations is corrected."""

Compiled = Callable[[Recipe], tuple[Module, Sequence[PassResult]]]
"""Runs the passes of a recipe that has no budget."""


@dataclass(frozen=True)
class Plan:
    """A recipe without a budget, the predicted memory of a rank in bytes, on the device and on the host, the seconds
    that a step takes longer, and the bytes that are held between forward and backward."""

    recipe: Recipe
    peak: int
    host: int
    seconds: float
    held: int

    @property
    def text(self) -> str:
        """What it does, in words."""
        recompute = self.recipe.recompute
        kept = f", {self.recipe.activation_budget} of activations kept" if recompute == "selective" else ""
        return f"recompute {recompute}{kept}; offload {self.recipe.offload or 'none'}"

    @property
    def line(self) -> str:
        """What it does and costs."""
        host = f", {size_text(self.host)} on the host" if self.host else ""
        return f"{self.text}: {size_text(self.peak)}{host}, {self.seconds * 1e3:.1f} ms a step"


def fitted(recipe: Recipe, compiled: Compiled) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe that fits, and a line for what was chosen and for each plan that was looked at.

    Raises OptionError where nothing fits, with the least that would.
    """
    budget = recipe.budget
    plans = list(_plans(replace(recipe, memory_budget=""), budget, compiled))
    fitting = [plan for plan in plans if plan.peak <= budget]
    if not fitting:
        least = min(plans, key=lambda plan: plan.peak)
        raise OptionError(
            f"a rank needs at least {size_text(least.peak, up=True)} with {recipe.batch} sequences of {recipe.seq} "
            f"tokens ({least.text}), more than the budget of {size_text(budget)}",
            where="--memory-budget",
            hint=f"--memory-budget {size_text(least.peak, up=True)}, a smaller --batch or --seq, or more ranks",
        )
    chosen = min(fitting, key=lambda plan: plan.seconds)
    told = [f"{'chosen' if p is chosen else 'fits' if p in fitting else 'too large'}: {p.line}" for p in plans]
    return chosen.recipe, (f"budget {size_text(budget)}; {chosen.line}", *told)


def _plans(recipe: Recipe, budget: int, compiled: Compiled) -> Iterator[Plan]:
    """All that is worth a look; the first plan that fits costs nothing, and ends it."""
    seen: list[Plan] = []
    for offload in _offloads(recipe):
        given = replace(recipe, offload=",".join(offload))
        plan = _plan(given, compiled)
        seen.append(plan)
        yield plan
        if plan.peak <= budget and plan is seen[0]:
            return
        if plan.peak > budget and recipe.recompute == "none":
            yield from _with_recompute(plan, budget, compiled)


def _offloads(recipe: Recipe) -> Iterator[tuple[str, ...]]:
    """What may wait on the host: what the recipe names, and more."""
    more = [what for what in OFFLOADABLE if what not in recipe.offloaded]
    for count in range(len(more) + 1):
        for added in itertools.combinations(more, count):
            yield tuple(what for what in OFFLOADABLE if what in (*recipe.offloaded, *added))


def _with_recompute(plan: Plan, budget: int, compiled: Compiled) -> Iterator[Plan]:
    """Plans that compute again as little as fits, or all that can be."""
    full = _plan(replace(plan.recipe, recompute="full"), compiled)
    yield full
    if full.peak > budget or "activations" in plan.recipe.offloaded:
        return  # what waits on the host need not be made again
    kept = plan.held - (plan.peak - budget)
    for _ in range(_ATTEMPTS):
        if not full.held <= kept < plan.held:
            return
        tried = _plan(replace(plan.recipe, recompute="selective", activation_budget=f"{kept}B"), compiled)
        yield tried
        if tried.peak <= budget:
            return
        # Held bytes are those of whole tensors, of which a rank of `tp` may have parts.
        ratio = max(1.0, (plan.held - tried.held) / max(1, plan.peak - tried.peak))
        kept = min(kept, tried.held) - int((tried.peak - budget) * ratio) - 1


def _plan(recipe: Recipe, compiled: Compiled) -> Plan:
    module, results = compiled(recipe)
    sizes = extents(module, {"B": recipe.batch, "S": recipe.seq})
    declared = declared_sizes(module)
    ranks = 1
    for size in declared.values():
        ranks *= size
    memory = RankMemory(module, sizes, mesh_sizes(module.mesh, {}, ranks))
    counts = next(r.report.counts for r in results if r.name == "recompute")
    host = memory.host()
    parts = declared.get("tp", 1)
    seconds = counts["cost_added"] / parts / FLOPS_PER_SECOND
    order = CollectiveOrder(module)
    flops = dict.fromkeys(Phase, 0.0)
    for node in module.entry_function("microbatch").nodes:
        flops[node.phase] += float(evaluate(order.flops(node), sizes)) / parts
    copied = host["activations"] / HOST_BYTES_PER_SECOND
    hidden = (flops[phase] / FLOPS_PER_SECOND for phase in (Phase.FORWARD, Phase.BACKWARD))
    seconds += sum(max(0.0, copied - meanwhile) for meanwhile in hidden)
    seconds += host["state"] / HOST_BYTES_PER_SECOND
    return Plan(recipe, memory.reserved(), sum(host.values()), seconds, counts["bytes_held"])
