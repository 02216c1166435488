"""Models with sliding windows serve what `transformers` computes, from a cache that holds little more than the windows.

Texts are several windows long, blocks that nobody holds are full of NaN, and half of the time there are not enough.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from mgraph.errors import OptionError
from mgraph.runtime.serving.blocks import most_blocks
from mgraph.runtime.serving.dispatch import Bucket
from mgraph.runtime.serving.engine import Engine
from mgraph.runtime.serving.package_stepper import PackageStepper
from tests.end_to_end.windows import BLOCK, KINDS, LENGTH, WINDOW, Poisoned, build, dense, prompts, served, worst
from tests.runtime.serving.test_step_graphs import again
from tests.sampling import sampled

CHUNK, OUTPUT, BOUND = 5, 20, 1e-4
"""BOUND is of the errors of log-probabilities."""
CASES = list(itertools.product(KINDS, *([False, True] for _ in range(4))))
ALWAYS = [
    ("mistral", True, True, True, False),
    ("gpt-oss", True, False, True, True),
    ("gemma2", True, True, True, False),
]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, tuple[Poisoned, Any]] = {}

    def open_(kind: str) -> tuple[Poisoned, Any]:
        if kind not in made:
            model = dense(kind)
            package, weights = build(kind, model, tmp_path_factory.mktemp(kind))
            text = (package / "step.py").read_text("utf-8")
            assert kind == "mistral" or "for i in range(0, 4, 2):" in text, "kinds by turns are a loop"
            made[kind] = Poisoned(package, weights, 2 * len(KINDS[kind]) + 2, max_tokens=32, max_requests=4), model
        return made[kind]

    return open_


def engine_of(stepper: Poisoned, num_blocks: int, **options: Any) -> Engine:
    stepper.resize(num_blocks)
    stepper.engine = Engine(stepper, **options)
    return stepper.engine


@pytest.mark.parametrize(
    ("kind", "prefix_cache", "chunked", "tight", "graphs"),
    sampled(CASES, 2, always=ALWAYS),
)
def test_served_is_what_the_dense_model_says(
    opened: Any, kind: str, prefix_cache: bool, chunked: bool, tight: bool, graphs: bool
) -> None:
    stepper, model = opened(kind)
    chunk = CHUNK if chunked else 0
    fewest = most_blocks(KINDS[kind], BLOCK, LENGTH, 1)
    engine = engine_of(stepper, fewest + (5 if tight else 200), prefix_cache=prefix_cache, chunk=chunk)
    if graphs:
        stepper.graphs = stepper.graphs_of(again, [Bucket(2, 2, True), Bucket(4, 4, True), Bucket(32, 4, False)])
    answers, _ = served(engine, prompts(8), OUTPUT)
    assert worst(model, answers) < BOUND
    assert (stepper.graphs is not None and stepper.graphs.replayed > 10) or not graphs
    counts = engine.scheduler.counts
    if tight:
        assert counts.preemptions > 0
    else:
        assert (counts.prefix_hits > 50) == prefix_cache and not counts.preemptions
    assert stepper.poisoned > 100
    texts = {tuple(answer.tokens) for answer in answers}
    assert len(texts) > 5 and max(len(set(text)) for text in texts) > 10, "constant texts would prove little"


@pytest.mark.parametrize("cap", ["attn_logit_softcapping", "final_logit_softcapping"])
@pytest.mark.parametrize("value", [None, 4.0])
def test_a_cap_that_only_one_of_them_has_would_show(cap: str, value: float | None) -> None:
    """The comparison above proves something of both caps of Gemma 2."""
    models = dense("gemma2"), dense("gemma2", **{cap: value})
    with torch.no_grad():
        one, other = (model(torch.tensor([prompts(4)[3]])).logits.log_softmax(-1) for model in models)
    assert float((one - other).abs().max()) > 100 * BOUND


def test_a_text_that_no_cache_would_hold_without_windows(opened: Any) -> None:
    """All layers have a window: a request holds no more than that and a chunk, and the whole cache is no larger."""
    stepper, model = opened("mistral")
    bound = -(-(WINDOW + CHUNK) // BLOCK) + 1
    engine = engine_of(stepper, 1 + bound, prefix_cache=False, chunk=CHUNK)
    answers, most = served(engine, [prompts(5)[4]], LENGTH - 67)
    assert engine.longest == LENGTH and stepper.num_blocks * BLOCK < LENGTH / 3
    assert 3 <= most <= bound and worst(model, answers) < BOUND
    few = engine_of(stepper, 1 + most_blocks([WINDOW], BLOCK, LENGTH, 1), chunk=0)
    cut, _ = served(few, [prompts(5)[4]], LENGTH - 67)
    assert cut[0].tokens == answers[0].tokens and worst(model, cut) < BOUND, "chunks are cut to what there is room for"


def test_layers_of_both_kinds_share_memory(opened: Any, tmp_path: Path) -> None:
    """The cache of sliding and full layers by turns takes what one kind would take, block for block."""
    stepper, _ = opened("gpt-oss")
    stepper.resize(40)
    caches = {name: tensor for name, tensor in stepper.state.items() if name.startswith("cache.")}
    places = {tensor.data_ptr() for tensor in caches.values()}
    assert len(caches) == 2 * len(places) and stepper.windows == (None, WINDOW)
    assert stepper.block_bytes * 40 == sum(t.nbytes for t in caches.values()) / 2
    mistral, _ = opened("mistral")
    assert mistral.windows == (WINDOW,) and "cache_groups" in mistral.package.manifest


def test_a_number_of_blocks_that_is_not_given(opened: Any) -> None:
    """As many as all requests of a step use at most: windows, not whole texts."""
    stepper, _ = opened("mistral")
    free = PackageStepper(stepper.package, None, max_tokens=32, max_requests=4)
    assert free.num_blocks == 1 + 4 * most_blocks([WINDOW], BLOCK, LENGTH, 1) + 32 // BLOCK < 1 + 4 * LENGTH // BLOCK


@pytest.mark.parametrize("kind", KINDS)
def test_batch_invariance_with_windows(opened: Any, kind: str) -> None:
    """The bits of a request are those that it has alone, whatever has left its window."""
    stepper, model = opened(kind)
    same = Poisoned(stepper.package, None, 40, max_tokens=32, max_requests=4, batch_invariant=True)
    same.state.update({n: t for n, t in stepper.state.items() if not n.startswith("cache.")})
    together, _ = served(engine_of(same, 80, chunk=CHUNK), prompts(6)[2:], 6)
    alone = [served(engine_of(same, 80, prefix_cache=False), [prompt], 6)[0][0] for prompt in prompts(6)[2:]]
    assert together == alone and worst(model, alone) < BOUND


def test_a_cache_of_so_many_bytes(opened: Any) -> None:
    """At least a block for each group."""
    for kind in KINDS:
        stepper, _ = opened(kind)
        blocks = PackageStepper(
            stepper.package, None, cache_bytes=9 * stepper.block_bytes + 1, max_requests=4
        ).num_blocks
        assert blocks == 9 and PackageStepper(stepper.package, None, cache_bytes=1).num_blocks == 1 + len(KINDS[kind])
    with pytest.raises(OptionError, match="a cache of 2 blocks holds no request") as refused:
        stepper.resize(2)
    assert refused.value.hint == "at least 3 blocks"
