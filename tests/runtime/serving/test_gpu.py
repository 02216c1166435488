"""A serve package on a GPU: its CUDA graphs give, bit for bit, what the same padded steps give launched op by op; both,
and steps that are not padded, agree with the CPU. The graphs take the memory that was planned."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.gpu.batch_invariance import check
from mgraph.compiler import compile_package
from mgraph.recipe import Recipe
from mgraph.runtime.serving.dispatch import Bucket
from mgraph.runtime.serving.engine import Engine
from mgraph.runtime.serving.llm import LLM
from mgraph.runtime.serving.package_stepper import PackageStepper
from mgraph.runtime.serving.parameters import SamplingParams
from mgraph.runtime.serving.step import Batch, Sampling

MODELS = ("dense-tiny", "moe-tiny", "gpt-oss-tiny")
LENGTHS = (1, 2, 7, 16, 17, 40, 3, 5)
MARGIN = 1e-3
"""Between the two likeliest tokens; where it is less, rounding may choose."""

Scores = list[list[tuple[int, float, float]]]
"""Of each prompt's tokens: the token, its log-probability, and by how much the likeliest leads."""


def relaunched(run: Callable[[], Sequence[Tensor]]) -> tuple[Callable[[], None], Sequence[Tensor]]:
    """In place of a capture: the launches of the padded step again, each time."""
    results = run()

    def again() -> None:
        for place, result in zip(results, run(), strict=True):
            place.copy_(result)

    return again, results


def generate(package: Path, device: str, *, graphs: bool = False, launched: bool = False) -> tuple[Scores, int]:
    """Greedy tokens of prompts that are served together, in few tokens a step: long prompts come in chunks. Also the
    number of steps that took the way of graphs; with `launched` they are padded alike but launched op by op."""
    stepper = PackageStepper(package, None, 40, device, seed=3, max_tokens=24, max_requests=4, cuda_graphs=graphs)
    if launched:
        assert stepper.graphs is not None
        stepper.graphs._capture = relaunched
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, 250, (length,), generator=generator).tolist() for length in LENGTHS]
    wanted = SamplingParams(temperature=0, max_tokens=12, logprobs=2, ignore_eos=True)
    scores: Scores = []
    for output in LLM.over(Engine(stepper, None)).generate(prompts, wanted):
        (choice,) = output.outputs
        assert len(choice.token_ids) == 12 and choice.logprobs is not None
        scores.append([(score.token, score.logprob, score.top[0][2] - score.top[1][2]) for score in choice.logprobs])
    return scores, stepper.graphs.replayed if stepper.graphs else 0


def agree(mine: Scores, theirs: Scores, bound: float) -> None:
    """Tokens are equal until one that hardly leads, log-probabilities are within the bound."""
    for found, wanted in zip(mine, theirs, strict=True):
        for (token, score, _), (other, expected, lead) in zip(found, wanted, strict=True):
            if token != other:
                assert lead < max(MARGIN, bound), f"{token} in place of {other}, which leads by {lead}"
                break
            assert abs(score - expected) <= bound


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_graphs_and_steps(model: str, precision: str, tmp_path: Path) -> None:
    recipe = Recipe(model=model, purpose="serve", precision=precision, max_length=64, output=str(tmp_path / "pkg"))
    package = compile_package(recipe).package
    assert package is not None
    replayed, steps = generate(package, "cuda", graphs=True)
    launched, same_steps = generate(package, "cuda", graphs=True, launched=True)
    assert steps == same_steps > 0
    assert replayed == launched, "bit for bit"
    bound = {"fp32": 1e-4, "bf16": 0.05}[precision]
    not_padded, _ = generate(package, "cuda")
    on_cpu, _ = generate(package, "cpu")
    agree(not_padded, on_cpu, bound)
    agree(replayed, on_cpu, bound)


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bits_do_not_depend_on_the_batch(model: str, precision: str, tmp_path: Path) -> None:
    """Random requests in chunks and tight caches, each against itself alone."""
    recipe = Recipe(model=model, purpose="serve", precision=precision, max_length=256, output=str(tmp_path / "pkg"))
    package = compile_package(replace(recipe, batch_invariant=True)).package
    assert package is not None and check(str(package), rounds=2, requests=8)


def step_of(stepper: PackageStepper, bucket: Bucket) -> tuple[Batch, Sampling]:
    """One that fills a bucket: of one token each, or the first of many; its rows ask for the likeliest token."""
    requests = bucket.requests if bucket.writing else min(bucket.requests, bucket.tokens - 1)
    counts = np.ones(requests, np.int32)
    counts[0] += bucket.tokens - requests
    starts = np.cumsum([0, *counts]).astype(np.int32)
    groups, width = len(stepper.windows), -(-stepper.max_length // stepper.block_size)
    positions = np.concatenate([np.arange(count) for count in counts]) % stepper.max_length
    zero, tables = np.zeros(bucket.tokens, np.int64), np.zeros((requests, width), np.int32)
    lengths = np.minimum(counts, stepper.max_length)
    rows = (starts[1:] - 1).astype(np.int64)
    batch = Batch(zero, positions, (zero,) * groups, starts, lengths, (tables,) * groups, rows, tuple(range(requests)))
    one, none, number = np.ones(requests, np.float32), np.zeros(requests, np.float32), np.zeros(requests, np.int64)
    numbers = none, np.zeros(requests, np.int32), one, none, number, number, number - 1
    return batch, Sampling(*numbers, one, none, none, None, None, None, 0)


def taken() -> int:
    """Bytes of the device that nobody else can have; of this process, if it has the device alone."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


LIBRARIES = 40 * 2**20
"""What cuBLAS works in, which torch gives it anew where graphs are captured, and pages of 2 MiB that are not full."""


@pytest.mark.gpu
def test_graphs_take_the_memory_that_was_planned(tmp_path: Path) -> None:
    """And no more, however often they are replayed. What the driver has from graphs that are gone it gives to others:
    so all stay here."""
    kept: list[PackageStepper] = []
    captured = []
    for model in MODELS:
        recipe = Recipe(model=model, purpose="serve", precision="bf16", max_length=64, output=str(tmp_path / model))
        package = compile_package(recipe).package
        assert package is not None
        stepper = PackageStepper(package, None, 40, "cuda", seed=3)
        kept.append(stepper)
        graphs, plan = stepper.graphs, stepper.package.manifest["graph_plan"]
        assert graphs is not None and len(graphs.buckets) == plan["graphs"] > 10
        steps = [step_of(stepper, bucket) for bucket in graphs.buckets]
        ran(stepper, steps)  # op by op
        captured.append(ran(stepper, steps))
        replayed = ran(stepper, steps)
        assert graphs.launches["graph"] == 2 * len(steps) and not graphs.failure
        planned = plan["memory"]
        budget = planned["pool"] + planned["logits"] + planned["graph"] * planned["graphs"]
        assert captured[-1] <= budget + LIBRARIES, f"{model}: {captured[-1]} bytes, {budget} were planned"
        assert replayed == 0, f"{model}: {replayed} bytes more by a replay"
    assert sum(captured) > 0


def ran(stepper: PackageStepper, steps: Sequence[tuple[Batch, Sampling]]) -> int:
    """Bytes that were taken by running each step once more, the smallest last."""
    before = taken()
    for step in reversed(steps):
        stepper.run(*step).get()
    return taken() - before
