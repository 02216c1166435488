"""The CUDA-graph plan: as good as trying everything, lists of other engines by name, and what it says of a workload."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from mgraph.codegen.buckets import (
    POLICIES,
    Bucket,
    affordable,
    by_policy,
    default_histogram,
    exponential,
    judged,
    linear,
    match,
    plan,
    read_histogram,
)
from mgraph.errors import OptionError

MAX_TOKENS, MAX_REQUESTS = 12, 6


def padding(buckets: tuple[Bucket, ...], histogram: dict[tuple[int, int], float]) -> float | None:
    """Expected padding; None where a step fits no bucket."""
    total = 0.0
    for (tokens, requests), weight in histogram.items():
        found = match(buckets, tokens, requests)
        if found is None:
            return None
        total += weight * (found.tokens - tokens)
    return total


@pytest.mark.parametrize("seed", range(12))
def test_a_single_graph_is_of_the_steps_that_come_oftener(seed: int) -> None:
    """And of those with the least padding."""
    source = random.Random(seed)
    histogram = {
        (t, r): source.random()
        for t in range(1, MAX_TOKENS + 1)
        for r in range(1, min(t, MAX_REQUESTS) + 1)
        if source.random() < 0.2
    } | {(3, 3): 0.1}
    possible = [Bucket(n, n, True) for n in range(1, MAX_REQUESTS + 1)]
    possible += [Bucket(n, MAX_REQUESTS, False) for n in range(2, MAX_TOKENS + 1)]
    found = plan(histogram, 1, MAX_TOKENS, MAX_REQUESTS)
    best = min((judged([one], histogram) for one in possible), key=lambda made: (-made.captured, made.waste))
    assert found.captured == pytest.approx(best.captured) and found.waste == pytest.approx(best.waste)


@pytest.mark.parametrize("seed", range(12))
def test_no_other_choice_of_buckets_pads_less(seed: int) -> None:
    source = random.Random(seed)
    histogram: dict[tuple[int, int], float] = {}
    for _ in range(source.randint(1, 9)):
        requests = source.randint(1, MAX_REQUESTS)
        tokens = requests if source.random() < 0.5 else source.randint(requests, MAX_TOKENS)
        histogram[tokens, requests] = source.random()
    possible = [Bucket(n, n, True) for n in range(1, MAX_REQUESTS + 1)]
    possible += [Bucket(n, MAX_REQUESTS, False) for n in range(2, MAX_TOKENS + 1)]
    for graphs in (2, 3):
        found = plan(histogram, graphs, MAX_TOKENS, MAX_REQUESTS)
        assert len(found.buckets) <= graphs
        every = (
            padding(tuple(sorted(c)), histogram)
            for k in (1, 2, 3)[:graphs]
            for c in itertools.combinations(possible, k)
        )
        mine = padding(found.buckets, histogram)
        assert mine is not None and mine <= min(p for p in every if p is not None) + 1e-9


@pytest.mark.parametrize(
    ("ranks", "graphs", "most", "sizes"),
    [
        (2, 4, 1000, [1000, 768, 512, 256]),
        (1, 16, 128, list(range(128, 0, -8))),
        (1, 4, 100, [100, 96, 64, 32]),
        (8, 16, 64, list(range(64, 0, -8))),
        (1, 1, 37, [37]),
        (3, 4, 100, [99, 66, 33]),
        (1, 16, 8, [8]),
    ],
)
def test_linear_sizes(ranks: int, graphs: int, most: int, sizes: list[int]) -> None:
    assert linear(graphs, most, ranks) == sizes


@pytest.mark.parametrize(
    ("ranks", "graphs", "most", "sizes"),
    [
        (1, -1, 512, [512, 256, 128, 64, 32, 16, 8, 4, 2, 1]),
        (1, 8, 128, [128, 64, 32, 16, 8, 4, 2, 1]),
        (4, 4, 100, [100, 52, 24, 4]),
        (2, -1, 512, [512, 256, 128, 64, 32, 16, 8, 4, 2]),
    ],
)
def test_exponential_sizes(ranks: int, graphs: int, most: int, sizes: list[int]) -> None:
    assert exponential(graphs, most, ranks) == sizes


def test_match_takes_the_smallest_bucket_that_holds_a_step() -> None:
    buckets = [Bucket(4, 4, True), Bucket(8, 8, True), Bucket(8, 8, False), Bucket(16, 8, False)]
    assert match(buckets, 3, 3) == Bucket(4, 4, True)
    assert match(buckets, 8, 8) == Bucket(8, 8, True)
    assert match(buckets, 4, 2) == Bucket(8, 8, False)
    assert match(buckets, 9, 2) == Bucket(16, 8, False)
    assert match(buckets, 9, 9) is None and match(buckets, 17, 1) is None


def test_a_plan_for_the_unknown_beats_the_lists() -> None:
    histogram = default_histogram(512, 64)
    assert sum(histogram.values()) == pytest.approx(1)
    plans = {policy: by_policy(policy, histogram, 16, 512, 64) for policy in POLICIES}
    assert all(len(p.buckets) <= 16 and p.captured == pytest.approx(1) for p in plans.values())
    assert plans["planned"].waste < min(plans["linear"].waste, plans["exponential"].waste)
    assert plans["planned"].facts()["graphs"] == len(plans["planned"].buckets)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_single_graph_is_for_steps_that_only_write(policy: str) -> None:
    for graphs in (1, 2, 3):
        found = by_policy(policy, default_histogram(512, 128), graphs, 512, 128).buckets
        assert 0 < len(found) <= graphs and any(b.writing for b in found)
        assert graphs == 1 or not all(b.writing for b in found)


def test_what_a_workload_does_with_buckets() -> None:
    found = judged([Bucket(4, 4, True)], {(3, 3): 1.0, (4, 4): 1.0, (9, 2): 2.0})
    assert found.waste == pytest.approx(1 / 8) and found.captured == pytest.approx(0.5)


def test_memory_bounds_the_number_of_graphs() -> None:
    assert affordable(100, 40, 20) == 3 and affordable(30, 40, 20) == 0


def test_a_workload_file(tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    file.write_text("[[3, 3, 2], [9, 2, 1], [3, 3, 1]]")
    assert read_histogram(file) == {(3, 3): 3.0, (9, 2): 1.0}
    for text in ("[[1, 2, 1]]", "{", "[[1]]", "[[0, 0, 1]]", "[]", "[[3, 3, 0]]", "[[1e400, 1, 1]]", "[[1, 1, 1e400]]"):
        file.write_text(text)
        with pytest.raises(OptionError, match="workload cannot be read"):
            read_histogram(file)
    with pytest.raises(OptionError, match="at least 1 each"):
        plan({}, 0, 1, 1)


def test_steps_larger_than_any_graph_have_none() -> None:
    found = plan({(40, 3): 1.0, (9, 9): 1.0}, 4, 16, 8)
    assert found.buckets == () and found.captured == found.waste == 0
