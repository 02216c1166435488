"""The CUDA graphs of a package for serving, and the memory of a rank that serves it.

What a rank needs, in bytes, for steps of at most STEP_TOKENS tokens of MOST_REQUESTS requests:

    weights   parameters and buffers
    steps     what a step holds at its peak that is launched op by op, with as many rows of logits as it may have, by
              kernels where the package has them; with --batch-invariant also the sums of attention over runs of keys,
              of which there are some whatever the step
    pool      the same of the largest step that is a graph: graphs share their memory, and keep it
    logits    one place that all graphs write logits to, and one that they read a bias from
    graphs    of each its launches, as the driver keeps them, its inputs and its few results
    cache     what is left of a budget, at least one sequence of the greatest length; of layers with a window no more
              than that sees

Within a budget there are as many graphs as fit, at most as many as asked for. What one takes does not depend on its
sizes but for its inputs, of which the largest count: so the plan with the least padding for a number of graphs is the
one with the least padding for the memory. A smaller bound of all sizes makes the pool smaller: of bounds that halve,
the one is taken whose graphs hold most of the expected steps, and of those the one that pads least. What an allocator
wastes and libraries keep for themselves is not in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from mgraph.codegen.buckets import (
    MOST_REQUESTS,
    MOST_TOKENS,
    Bucket,
    BucketPlan,
    affordable,
    by_policy,
    default_histogram,
    read_histogram,
)
from mgraph.codegen.kernel_sites import KernelSites, kernel_sites
from mgraph.codegen.memory import RankMemory
from mgraph.codegen.triton.kernel import ITEM_BYTES
from mgraph.errors import OptionError
from mgraph.ir.graph import Module, StateKind
from mgraph.ir.local import declared_sizes
from mgraph.ir.mesh import mesh_sizes
from mgraph.ir.types import DType, TensorType
from mgraph.passes.activations import extents
from mgraph.passes.cache_groups import cache_groups
from mgraph.passes.calls import callee
from mgraph.passes.differentiation import VIEWS
from mgraph.passes.recompute import size_text
from mgraph.passes.serve_entries import SAMPLING
from mgraph.recipe import Recipe
from mgraph.runtime.kernels import evaluate
from mgraph.runtime.serving.blocks import most_blocks
from mgraph.runtime.serving.scheduler import most_rows

STEP_TOKENS = 2048
"""The most tokens of a step, unless a server is told otherwise."""
LONGEST_TEXT = 131072
"""The most tokens of penalised texts that a graph holds."""
LAUNCH_BYTES = 6144
"""What the driver keeps of the device's memory for a launch of a graph; 2.1 to 5.9 KB were measured on an H200."""


@dataclass(frozen=True)
class ServeMemory:
    """Bytes of a rank; `graph` is that of each of `graphs`, `cache` that of `blocks` blocks."""

    weights: int
    steps: int
    pool: int
    logits: int
    graph: int
    graphs: int
    cache: int
    blocks: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.steps + self.pool + self.logits + self.graph * self.graphs + self.cache

    def facts(self) -> dict[str, int]:
        """As plain data."""
        return asdict(self)


@dataclass(frozen=True)
class ServingPlan:
    """Which steps are graphs, and the memory of a rank; `budget` 0: there is none, and the cache is the least."""

    buckets: BucketPlan
    memory: ServeMemory
    budget: int

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> ServingPlan:
        """Of what the manifest says."""
        buckets = tuple(Bucket(*bucket) for bucket in facts["buckets"])
        plan = BucketPlan(buckets, facts["waste"], facts["captured"])
        return cls(plan, ServeMemory(**facts["memory"]), facts["budget"])

    def facts(self) -> dict[str, Any]:
        """What the manifest says."""
        return self.buckets.facts() | {"budget": self.budget, "memory": self.memory.facts()}

    def lines(self) -> tuple[str, ...]:
        """For people."""
        plan, memory = self.buckets, self.memory
        told = "no step is a graph"
        if plan.buckets:
            largest = max(bucket.tokens for bucket in plan.buckets)
            told = f"{memory.graphs} graphs of up to {largest} tokens, {size_text(memory.graph)} each: "
            told += f"{plan.captured:.1%} of the expected steps, {plan.waste:.1%} padding"
        sizes = {name: getattr(memory, name) for name in ("weights", "steps", "pool", "logits", "cache")}
        sizes["graphs"] = memory.graph * memory.graphs
        parts = ", ".join(f"{name} {size_text(size)}" for name, size in sizes.items())
        least = "" if self.budget else " at least"
        return told, f"a rank needs {size_text(memory.total)}{least}: {parts}; {memory.blocks} blocks"


class _Sizes:
    """What parts of a serve package take on a rank."""

    def __init__(self, module: Module, recipe: Recipe) -> None:
        self._module = module
        declared, ranks = declared_sizes(module), 1
        for size in declared.values():
            ranks *= size
        self._mesh = mesh_sizes(module.mesh, {}, ranks)
        sites = kernel_sites(module, gpu=bool(recipe.archs), fixed=recipe.batch_invariant)
        self._by_kernels = _by_kernels(module, sites)
        memory = self._memory(1, 1)
        kinds = memory.state()
        self.weights = kinds.get(StateKind.PARAM, 0) + kinds.get(StateKind.BUFFER, 0)
        self.block = kinds[StateKind.CACHE]
        windows = [group.window for group in cache_groups(module)]
        self.longest = most_blocks(windows, recipe.block_size, int(module.dims["S"].maximum or 0), 1)
        step = module.entry_function("step")
        logits = step.results[module.entries["step"].outputs.index("logits")].tensor
        self.logits = 2 * memory.bytes(TensorType(DType.F32, (MOST_REQUESTS, *logits.shape[1:])))
        self._launches = _launches_of(module, step.name)
        self._sums = _kept_sums(module, recipe, sites) if recipe.batch_invariant and recipe.archs else 0

    def peak(self, tokens: int, requests: int, rows: int = 0) -> int:
        """Of a step and of what samples. A graph has a row of logits for each request; other steps may have more."""
        memory = self._memory(tokens, requests, rows)
        return max(memory.entry(name).bytes for name in ("step", *SAMPLING)) + tokens * self._sums

    def graph(self, tokens: int) -> int:
        """A graph: its launches, its inputs and its results."""
        memory = self._memory(tokens, MOST_REQUESTS)
        inputs = sum(memory.bytes(p.type) for p in self._module.entry_function("step").params)
        function = self._module.entry_function("sample")
        kept = (*function.params[1:], *function.results)  # but for the logits
        return inputs + sum(memory.bytes(v.type) for v in kept) + LAUNCH_BYTES * self._launches

    def _memory(self, tokens: int, requests: int, rows: int = 0) -> RankMemory:
        given = {"T": tokens, "R": requests, "N": rows or requests, "K": LONGEST_TEXT, "P": 1}
        return RankMemory(self._module, extents(self._module, given), self._mesh, self._by_kernels)


def _by_kernels(module: Module, sites: KernelSites) -> frozenset[str]:
    """Ops that kernels run wherever they stand: what torch's forms of them need besides is not needed."""
    nodes = [node for function in module.functions.values() for node in function.nodes]
    left = {node.op for node in nodes if sites.name(node) is None}
    return frozenset({node.op for node in nodes} - left)


def _kept_sums(module: Module, recipe: Recipe, sites: KernelSites) -> int:
    """Bytes a token that attention over runs of a fixed length keeps between its launches, in the layer with most."""
    width = -(-int(module.dims["S"].maximum or 0) // recipe.block_size)
    found = [0]
    for spec in sites.specs:
        if any(tensor.name == "blocks" for tensor in spec.inputs):
            dims = {"T": 1, "W": width}
            for name, expression in spec.dims.items():
                dims[name] = evaluate(expression, dims)
            shapes = [[evaluate(extent, dims) for extent in tensor.shape] for tensor in spec.scratch]
            found.append(sum(prod(s) * ITEM_BYTES[t.dtype] for s, t in zip(shapes, spec.scratch, strict=True)))
    return max(found)


def _launches_of(module: Module, name: str) -> int:
    """Of a function and what it calls: one for each node that is no view."""
    nodes = module.functions[name].nodes
    within = sum(_launches_of(module, callee(node)) for node in nodes if node.op == "call")
    return within + sum(node.op not in VIEWS and node.op != "call" for node in nodes)


def serving_plan(recipe: Recipe, module: Module) -> ServingPlan:
    """The graphs of a module that serves, within the recipe's budget if it has one.

    Raises OptionError where weights, steps and the shortest cache exceed it, or a workload cannot be read.
    """
    sizes = _Sizes(module, recipe)
    most = MOST_TOKENS, MOST_REQUESTS
    workload = read_histogram(Path(recipe.graph_workload)) if recipe.graph_workload else default_histogram(*most)
    steps, least = sizes.peak(STEP_TOKENS, MOST_REQUESTS, most_rows(MOST_REQUESTS)), 1 + sizes.longest
    bare = ServeMemory(sizes.weights, steps, 0, 0, 0, 0, least * sizes.block, least)
    budget = recipe.budget
    if budget and bare.total > budget:
        raise OptionError(
            f"a rank that serves needs at least {size_text(bare.total, up=True)}, more than the budget of "
            f"{size_text(budget)}: weights {size_text(bare.weights)}, a step of {STEP_TOKENS} tokens "
            f"{size_text(bare.steps)}, a cache for one sequence of the greatest length {size_text(bare.cache)}",
            where="--memory-budget",
            hint=f"--memory-budget {size_text(bare.total, up=True)}, a smaller --max-length, or more ranks of tp",
        )
    found = [ServingPlan(BucketPlan((), 0.0, 0.0), bare, budget)]
    tokens = MOST_TOKENS
    while tokens and (budget or tokens == MOST_TOKENS):
        requests = min(tokens, MOST_REQUESTS)
        pool, graph = sizes.peak(tokens, requests), sizes.graph(tokens)
        fixed = bare.total + pool + sizes.logits
        count = min(recipe.graphs, affordable(budget, fixed, graph)) if budget else recipe.graphs
        if count:
            asked = range(count, 0, -1) if budget else [count]  # a list may have one more than it is asked for
            plans = (by_policy(recipe.graph_policy, workload, graphs, tokens, requests) for graphs in asked)
            plan = next(plan for plan in plans if not budget or len(plan.buckets) <= count)
            taken = replace(bare, pool=pool, logits=sizes.logits, graph=graph, graphs=len(plan.buckets))
            found.append(ServingPlan(plan, taken, budget))
        tokens //= 2
    best = max(found, key=lambda plan: (plan.buckets.captured, -plan.buckets.waste))
    return replace(best, memory=_with_cache(best.memory, sizes.block, budget))


def _with_cache(memory: ServeMemory, block: int, budget: int) -> ServeMemory:
    """With as many more blocks as the budget leaves."""
    more = max(0, budget - memory.total) // block
    return replace(memory, cache=memory.cache + more * block, blocks=memory.blocks + more)
