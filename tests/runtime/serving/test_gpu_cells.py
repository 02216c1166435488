"""Every way to set an engine up, over packages of `transformers` classes, against the class itself on the same device:
one request at a time, in f32. On a GPU steps are launched op by op, as they are and padded, and replayed as CUDA
graphs; on the CPU they are launched, and their results looked at as late as on a GPU, so that requests come together in
the same way."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from mgraph.runtime.serving.dispatch import Bucket, Why
from mgraph.runtime.serving.engine import Engine
from mgraph.runtime.serving.llm import LLM, RequestOutput
from mgraph.runtime.serving.step import Stepper
from mgraph.runtime.serving.step_graphs import CudaCapture, StepGraphs
from tests.end_to_end import windows
from tests.end_to_end.cells import CELLS, CHUNK, Ahead, Exact, answers, dense, worst
from tests.families.configs import eager
from tests.runtime.serving.test_step_graphs import again

BOUND = 1e-4
AMPLE, REQUESTS = 200, 5
"""Blocks of a cache that is never full; requests of a step."""
BUCKETS = [Bucket(n, n, True) for n in (1, 2, 3, 5)] + [Bucket(n, REQUESTS, False) for n in (8, 64, 256)]


def _of(family: str, **changes: Any) -> nn.Module:
    return windows.spread(eager(family, seed=3, **changes))


KINDS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "mha": (lambda: _of("llama", num_key_value_heads=4), 16, 6),
    "gqa": (lambda: _of("llama"), 16, 6),
    "qwen3": (lambda: _of("qwen3"), 16, 6),
    "qwen3-moe": (lambda: _of("qwen3-moe"), 16, 6),
    "window": (lambda: windows.dense("mistral"), 4, 6),
    "gpt-oss": (lambda: _of("gpt-oss"), 4, 18),
    "gemma2": (lambda: windows.dense("gemma2"), 4, 18),
}
"""What makes a model, the rows of a block of its cache, and the blocks of a tight one: requests are preempted, and some
beginnings still found. gpt-oss has windows, sinks and experts, Gemma 2 windows, and caps of scores and logits."""


def opened(kind: str, directory: Path, device: str, batch_invariant: bool) -> tuple[windows.Poisoned, Exact]:
    """A package of a kind with its weights on a device, and the plain model there."""
    make, block_size, _ = KINDS[kind]
    model: Any = make().eval()
    more = {"arch": "sm_90a", "batch_invariant": batch_invariant} if device == "cuda" else {}
    package, weights = windows.build(kind, model, directory, block_size=block_size, **more)
    torch.backends.cuda.matmul.allow_tf32 = False
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    sizes: dict[str, Any] = {"max_tokens": 512, "max_requests": REQUESTS}
    stepper = windows.Poisoned(package, weights, AMPLE, device, batch_invariant=batch_invariant, **sizes)
    return stepper, dense(model.to(device))


def check_cells(kind: str, stepper: windows.Poisoned, exact: Exact, batch_invariant: bool) -> str:
    """All cells: the answers are the model's, however steps are launched, and those of graphs have the bits of the same
    padded steps that are launched. Where bits do not depend on the batch, those of all cells are the same. What
    happened, in words."""
    errors: dict[str, float] = {}
    launched: Counter[str] = Counter()
    bits: Counter[Hashable] = Counter()
    for cache in ("ample", "tight"):
        stepper.resize(AMPLE if cache == "ample" else KINDS[kind][2])
        ways: dict[str, StepGraphs | None] = {"as they are": None, "padded": stepper.graphs_of(again, BUCKETS)}
        if stepper.device.type == "cuda":
            ways["graphs"] = stepper.graphs_of(CudaCapture(), BUCKETS)
        for prompts, prefix_cache in dict.fromkeys(cell[:2] for cell in CELLS):
            found = {way: answered(stepper, graphs, prompts, prefix_cache, cache) for way, graphs in ways.items()}
            for graphs in ways.values():
                assert graphs is None or set(graphs.eager) <= {Why.FIRST, Why.TOO_MANY_ROWS}, graphs.failure
            for way, outputs in found.items():
                errors[way] = max(errors.get(way, 0.0), worst(exact, outputs))
                bits[tuple((output.outputs, output.prompt_logprobs) for output in outputs)] += 1
            assert found.get("graphs", found["padded"]) == found["padded"], "bit for bit"
        for graphs in ways.values():
            launched.update(graphs.launches if graphs else {})
            assert graphs is None or graphs.replayed > graphs.eager.total()
    assert max(errors.values()) <= BOUND, errors
    assert len(bits) == 1 or not batch_invariant
    numbers = {str(key): count for key, count in launched.items()}
    return f"errors {errors}, bits alike {list(bits.values())}, {stepper.poisoned} blocks of NaN, steps {numbers}"


def answered(
    stepper: windows.Poisoned, graphs: StepGraphs | None, prompts: str, prefix_cache: bool, cache: str
) -> list[RequestOutput]:
    """The answers of one cell, in which has happened what it is for."""
    stepper.graphs = graphs
    run = stepper if stepper.asynchronous else cast(Stepper, Ahead(stepper))
    stepper.engine = Engine(run, prefix_cache=prefix_cache, max_tokens=CHUNK if prompts == "chunks" else 0)
    outputs = answers(LLM.over(stepper.engine), seed=0)
    scheduler, most = stepper.engine.scheduler, max(tokens for tokens, _ in stepper.engine.shapes)
    assert (most > CHUNK) == (prompts == "whole")
    assert (scheduler.counts.preemptions > 0) == (cache == "tight")
    assert (scheduler.counts.prefix_hits > 0) == prefix_cache
    assert scheduler.pool.available == scheduler.pool.usable
    return outputs


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_cells_on_the_cpu(kind: str, tmp_path: Path) -> None:
    check_cells(kind, *opened(kind, tmp_path, "cpu", False), False)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_cells_on_a_gpu(kind: str, batch_invariant: bool, tmp_path: Path) -> None:
    begun = time.perf_counter()
    stepper, exact = opened(kind, tmp_path, "cuda", batch_invariant)
    made = time.perf_counter()
    said = check_cells(kind, stepper, exact, batch_invariant)
    print(f"{kind}: {said}; {made - begun:.1f} s to make, {time.perf_counter() - made:.1f} s")
