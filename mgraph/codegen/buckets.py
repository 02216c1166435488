"""The CUDA-graph plan of serving: for which numbers of tokens and requests a step is captured.

A step of t tokens of r requests is replayed by the graph of a bucket that holds it; what is left of the bucket's tokens
is padding. Steps that only write have a token for each request, so t = r: they take buckets of n tokens of n requests,
whose attention may rest on that. Steps with parts of prompts take buckets of n tokens that hold as many requests as
there may be. `plan` finds the buckets with the least expected padding, exactly: a dynamic programme for each kind gives
the least padding with k buckets, and the number of graphs is divided between the two as is best. Larger steps run
eagerly.

`linear` and `exponential` are the lists of sizes that Megatron-LM's inference engine has, by those names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mgraph.errors import OptionError

MOST_TOKENS, MOST_REQUESTS = 512, 128
"""Of a step that is captured: larger ones have work enough to hide their launches."""
POLICIES = ("planned", "linear", "exponential")
Histogram = Mapping[tuple[int, int], float]
"""How often a step has (tokens, requests)."""


@dataclass(frozen=True, order=True)
class Bucket:
    """What a captured step holds; if it is `writing`, each request has one token."""

    tokens: int
    requests: int
    writing: bool


@dataclass(frozen=True)
class BucketPlan:
    """The buckets, the smallest first, and what a workload is expected to do with them."""

    buckets: tuple[Bucket, ...]
    waste: float
    """Padding over all tokens of captured steps, 0 to 1."""
    captured: float
    """The part of steps that a bucket holds, 0 to 1."""

    def facts(self) -> dict[str, Any]:
        """As plain data."""
        pairs = [[b.tokens, b.requests, b.writing] for b in self.buckets]
        return {"buckets": pairs, "graphs": len(pairs), "waste": self.waste, "captured": self.captured}


def match(buckets: Sequence[Bucket], tokens: int, requests: int) -> Bucket | None:
    """The smallest bucket of its kind that holds a step; None where it runs eagerly."""
    alike = (b for b in buckets if b.writing == (tokens == requests))
    return min((b for b in alike if b.tokens >= tokens and b.requests >= requests), default=None)


def plan(histogram: Histogram, graphs: int, max_tokens: int, max_requests: int, multiple: int = 1) -> BucketPlan:
    """At most `graphs` buckets of at most `max_tokens` tokens with the least expected padding for a workload.

    Sizes are multiples of `multiple`, or the bound. There are none where every step is larger. A single one, where
    steps are of both kinds, is of those that come oftener. Raises OptionError where there can be no bucket.
    """
    if graphs < 1 or max_tokens < 1 or max_requests < 1:
        raise OptionError(f"{graphs} graphs of {max_tokens} tokens and {max_requests} requests", hint="at least 1 each")
    writing: dict[int, float] = {}
    mixed: dict[int, float] = {}
    for (tokens, requests), weight in histogram.items():
        if requests <= max_requests and tokens <= (max_requests if tokens == requests else max_tokens):
            kind = writing if tokens == requests else mixed
            kind[tokens] = kind.get(tokens, 0.0) + weight
    if not writing and not mixed:
        return judged((), histogram)
    bounds = min(max_requests, max_tokens), max_tokens
    tables = [_least(kind, graphs, bound, multiple) for kind, bound in zip((writing, mixed), bounds, strict=True)]
    shares = [(i, j) for i in range(len(tables[0])) for j in range(len(tables[1])) if 0 < i + j <= graphs]
    needed = [(i, j) for i, j in shares if (i or not writing) and (j or not mixed)]
    only = (1, 0) if sum(writing.values()) >= sum(mixed.values()) else (0, 1)
    i, j = min(needed or [only], key=lambda ij: (tables[0][ij[0]][0] + tables[1][ij[1]][0], sum(ij)))
    return judged(_both(tables[0][i][1], tables[1][j][1], max_requests), histogram)


def _both(writing: Sequence[int], mixed: Sequence[int], requests: int) -> list[Bucket]:
    return [*(Bucket(n, n, True) for n in writing), *(Bucket(n, requests, False) for n in mixed)]


def _least(sizes: Mapping[int, float], most: int, bound: int, multiple: int) -> list[tuple[float, tuple[int, ...]]]:
    """For k = 0, 1, … up to `most`: the least expected padding of k sizes that hold all of `sizes`, and these sizes.

    The largest size of each bucket, rounded up, is the best there is for it: so buckets are runs of sizes in order.
    cost(k, e) = min over b < e of cost(k - 1, b) + padding of the run b..e.
    """
    if not sizes:
        return [(0.0, ())]
    ordered = sorted(sizes)
    tops = [min(bound, -(-size // multiple) * multiple) for size in ordered]
    weight = np.array([0.0, *np.cumsum([sizes[s] for s in ordered])])
    mass = np.array([0.0, *np.cumsum([sizes[s] * s for s in ordered])])
    count = len(ordered)
    cost: NDArray[np.float64] = np.full(count + 1, math.inf)
    cost[0] = 0.0
    table: list[tuple[float, tuple[int, ...]]] = [(math.inf, ())]
    backs: list[NDArray[np.int64]] = []
    for _ in range(min(most, count)):
        following, back = np.full(count + 1, math.inf), np.zeros(count + 1, np.int64)
        for end in range(1, count + 1):
            runs = cost[:end] + tops[end - 1] * (weight[end] - weight[:end]) - (mass[end] - mass[:end])
            back[end] = int(runs.argmin())
            following[end] = runs[back[end]]
        cost = following
        backs.append(back)
        table.append((float(cost[count]), _sizes(backs, tops)))
    return table


def _sizes(backs: Sequence[NDArray[np.int64]], tops: Sequence[int]) -> tuple[int, ...]:
    """The sizes of the best runs, read off the choices made."""
    found, end = set(), len(tops)
    for back in reversed(backs):
        if end:
            found.add(tops[end - 1])
        end = int(back[end])
    return tuple(sorted(found))


def judged(buckets: Sequence[Bucket], histogram: Histogram) -> BucketPlan:
    """Any buckets, with what a workload is expected to do with them."""
    ordered = tuple(sorted(set(buckets)))
    real = held = padded = total = 0.0
    for (tokens, requests), weight in histogram.items():
        total += weight
        found = match(ordered, tokens, requests)
        if found is not None:
            held += weight
            real += weight * tokens
            padded += weight * found.tokens
    return BucketPlan(ordered, 1 - real / padded if padded else 0.0, held / total if total else 0.0)


def linear(graphs: int, most: int, ranks: int = 1) -> list[int]:
    """Sizes in equal steps, multiples of 8 and of `ranks`, up to `most` (rounded down to `ranks`); largest first."""
    top = most // ranks * ranks
    if graphs == 1:
        return [top]
    step = max(8 * -(-int(most / graphs) // 8), 8)
    step = -(-step // ranks) * ranks
    return sorted({*range(step, top, step), top}, reverse=True)


def exponential(graphs: int, most: int, ranks: int = 1) -> list[int]:
    """Sizes by halves from `most` down to `ranks`, each the nearest multiple of `ranks`; largest first.

    `graphs` -1 takes as many as there are; where there are more than asked for, those next to the smallest go.
    """
    count = max(4, int(math.log2(most)) + 2) if graphs == -1 else graphs
    sizes = {most // ranks * ranks, ranks}
    size = most / 2
    while size >= 1:
        sizes.add(max(ranks, math.floor(size / ranks + 0.5) * ranks))
        size /= 2
    ordered = sorted(sizes, reverse=True)
    return ordered if len(ordered) <= count else [*ordered[: count - 1], ordered[-1]][:count]


def by_policy(
    policy: str, histogram: Histogram, graphs: int, max_tokens: int, max_requests: int, ranks: int = 1
) -> BucketPlan:
    """The plan of a policy of POLICIES: half of a list's graphs, or the only one, are for steps that only write."""
    if policy == "planned":
        return plan(histogram, graphs, max_tokens, max_requests, ranks)
    sizes = {"linear": linear, "exponential": exponential}[policy]
    writing = sizes(max(1, graphs // 2), max_requests, ranks)
    mixed = sizes(graphs - len(writing), max_tokens, ranks) if graphs > len(writing) else []
    return judged(_both(writing, mixed, max_requests), histogram)


def affordable(memory: int, fixed: int, per_graph: int) -> int:
    """How many graphs fit into `memory` bytes: they share a pool of `fixed` bytes, and each has `per_graph` besides."""
    return max(0, (memory - fixed) // per_graph)


def default_histogram(max_tokens: int, max_requests: int) -> dict[tuple[int, int], float]:
    """A workload of which nothing is known: nine steps of ten only write, every doubling of requests equally often;
    of the others, every doubling of tokens."""
    made: dict[tuple[int, int], float] = {}
    for requests in range(1, max_requests + 1):
        made[requests, requests] = 0.9 / requests
    scale = sum(made.values())
    made = {pair: 0.9 * weight / scale for pair, weight in made.items()}
    mixed = {tokens: 1 / tokens for tokens in range(2, max_tokens + 1)}
    scale = sum(mixed.values())
    for tokens, weight in mixed.items():
        pair = tokens, min(max_requests, max(1, tokens // 2))
        made[pair] = made.get(pair, 0.0) + 0.1 * weight / scale
    return made


def read_histogram(path: Path) -> dict[tuple[int, int], float]:
    """A workload from a JSON file: a list of [tokens, requests, how often]. Raises OptionError."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        made: dict[tuple[int, int], float] = {}
        for tokens, requests, weight in rows:
            if (
                not all(isinstance(number, int | float) for number in (tokens, requests, weight))
                or not (1 <= requests <= tokens and 0 <= weight < math.inf)
                or int(tokens) != tokens
                or int(requests) != requests
            ):
                raise ValueError(f"[{tokens}, {requests}, {weight}] is no step")
            made[int(tokens), int(requests)] = made.get((int(tokens), int(requests)), 0.0) + float(weight)
        if not any(made.values()):
            raise ValueError("it has no step")
    except (OSError, ValueError, TypeError, OverflowError) as error:
        hint = "a JSON list of [tokens, requests, how often], with 1 <= requests <= tokens"
        raise OptionError(f"the workload cannot be read: {error}", str(path), hint) from error
    return made
