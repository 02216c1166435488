"""A module over a mesh beside the same module on one rank: states laid out by their placements, and put together."""

from __future__ import annotations

import functools
from typing import Any

import torch

from mgraph.compiler import Compilation, build_module
from mgraph.ir.graph import Module
from mgraph.ir.interpreter import run_ranks
from mgraph.ir.local import part
from mgraph.ir.types import Shard, TensorType
from mgraph.passes.samples import Shapes, random_inputs, random_state, zero_accumulators
from mgraph.recipe import Recipe

Tensors = dict[str, Any]


@functools.lru_cache(maxsize=2)
def _built(recipe: Recipe) -> Compilation:
    """Several test files begin with the same model."""
    return build_module(recipe)


def trained(model: str, after: str = "adamw", **options: Any) -> Module:
    """The training graph of a model on one rank, as it is after a pass: before it is spread."""
    done = _built(Recipe(model=model, arch="none", mesh="dp=1", disable="data-parallel", **options))
    return done.snapshots.snapshots[[r.name for r in done.results].index(after) + 1].module


def whole(ranks: list[Any], type_: TensorType, axis: str) -> Any:
    """A tensor put together from what the ranks of an axis hold; where it is not split they must hold the same."""
    placement = type_.on(axis)
    if isinstance(placement, Shard):
        return torch.cat(ranks, placement.dim)
    for other in ranks[1:]:
        torch.testing.assert_close(other, ranks[0], rtol=1e-12, atol=1e-12)
    return ranks[0]


def error(expected: Any, found: Any) -> float:
    """The largest difference, relative to the largest element."""
    assert expected.shape == found.shape
    if not expected.numel():
        return 0.0
    scale = max(float(expected.double().abs().max()), 1e-6)
    return float((expected.double() - found.double()).abs().max()) / scale


def worst_difference(before: Module, after: Module, axis: str, size: int, steps: int = 3) -> float:
    """Of all outputs and states over some steps on float64: one rank against the ranks of the axis."""
    state = {n: t.double() if t.is_floating_point() else t for n, t in random_state(before, 0).items()}
    state = zero_accumulators(before, state) | {n: torch.zeros_like(state[n]) for n in ("step", "skipped")}
    sizes = {axis: size}
    parts = [{n: part(t, after.state[n].type, sizes, {axis: r}) for n, t in state.items()} for r in range(size)]
    worst = 0.0
    for step in range(steps):
        batch = random_inputs(before.entry_function("microbatch"), Shapes.of(after), step)
        for entry in before.entries:
            names = [p.name for p in before.entry_function(entry).params]
            inputs = {n: torch.tensor(0.01) if n == "lr" else batch[n] for n in names}
            outputs, updates = run_ranks(before, entry, [inputs], [state], {}, lifted=True)
            spread = run_ranks(after, entry, [inputs] * size, parts, sizes, lifted=True)
            for name, tensor in outputs[0].items():
                worst = max(worst, *(error(tensor, rank[name]) for rank in spread[0]))
            for name, tensor in updates[0].items():
                found = whole([rank[name] for rank in spread[1]], after.state[name].type, axis)
                worst = max(worst, error(tensor, found))
            state |= updates[0]
            parts = [{**old, **new} for old, new in zip(parts, spread[1], strict=True)]
    return worst
