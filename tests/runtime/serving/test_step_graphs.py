"""Steps in buckets: what is padded is never read, the smallest bucket is taken, and what runs without says why.

There is no GPU here: a capture is a function that runs again, on the same fixed tensors, into the same results.
"""

from __future__ import annotations

import json
import shutil
import sys
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from mgraph.compiler import compile_package
from mgraph.errors import OptionError
from mgraph.passes.serve_entries import SAMPLING
from mgraph.recipe import Recipe
from mgraph.runtime.handshake import MeshError
from mgraph.runtime.package import Package
from mgraph.runtime.serving import package_stepper
from mgraph.runtime.serving.choices import Sampler
from mgraph.runtime.serving.dispatch import Bucket, Why
from mgraph.runtime.serving.engine import Engine, Score
from mgraph.runtime.serving.llm import LLM
from mgraph.runtime.serving.package_stepper import PackageStepper
from mgraph.runtime.serving.parameters import RequestError, SamplingParams
from mgraph.runtime.serving.step import Stepper
from mgraph.runtime.serving.step_graphs import Inputs, known
from mgraph.runtime.tokenizer import ByteTokenizer
from tests.end_to_end.cells import Ahead

BUCKETS = [Bucket(2, 2, True), Bucket(4, 4, True), Bucket(16, 4, False)]


def again(run: Callable[[], Sequence[Tensor]]) -> tuple[Callable[[], None], Sequence[Tensor]]:
    """A capture that runs nothing yet, and whose replay writes where the first results are."""
    results = [torch.empty_like(t) for t in run()]

    def replay() -> None:
        for into, made in zip(results, run(), strict=True):
            into.copy_(made)

    return replay, results


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = Recipe(
        model="moe-tiny",
        purpose="serve",
        arch="none",
        output=str(tmp_path_factory.mktemp("graphs") / "package"),
        max_length=32,
        block_size=4,
        graphs=6,
    )
    path = compile_package(recipe).package
    assert path is not None
    return path


KINDS = [
    (3, SamplingParams(max_tokens=8, temperature=0)),
    (11, SamplingParams(max_tokens=6, temperature=1.0, seed=5)),
    (1, SamplingParams(max_tokens=9, temperature=0.7, top_k=20, seed=6, logprobs=2)),
    (18, SamplingParams(max_tokens=5, temperature=0)),
    (9, SamplingParams(max_tokens=7, temperature=0, frequency_penalty=1.5, repetition_penalty=1.3)),
    (2, SamplingParams(max_tokens=6, temperature=0.9, seed=8, presence_penalty=1.0, logit_bias={65: 5.0})),
    (5, SamplingParams(max_tokens=4, temperature=0, allowed_token_ids=[3, 5, 7], logprobs=1)),
    (4, SamplingParams(max_tokens=7, temperature=1.2, top_p=0.8, min_p=0.01, seed=9)),
]
"""Lengths of prompts, and what requests of all kinds ask for."""


def answers(stepper: PackageStepper, which: Sequence[int] = range(len(KINDS))) -> list[tuple[int, ...]]:
    """What some of the requests get, several at a time."""
    engine = Engine(stepper, prefix_cache=False, chunk=7)
    said: dict[int, list[int]] = {}
    for number in which:
        length, params = KINDS[number]
        said[engine.submit([(7 * i + number) % 256 for i in range(length)], params)] = []
    while engine.unfinished:
        for delta in engine.step():
            said[delta.group] += delta.tokens
    return [tuple(tokens) for tokens in said.values()]


def test_tokens_are_those_of_steps_without_buckets(package: Path) -> None:
    plain = PackageStepper(package, num_blocks=64, max_tokens=16, max_requests=4)
    padded = PackageStepper(package, num_blocks=64, max_tokens=16, max_requests=4)
    for name, tensor in padded.state.items():
        if name.startswith("cache."):
            tensor[:4] = float("nan")  # the block that padding is written to
    graphs = padded.graphs = padded.graphs_of(again, BUCKETS)
    assert answers(padded) == answers(plain)
    assert graphs.replayed > 10 and graphs.eager == {Why.FIRST: 3}
    assert sum(padded.launches.values()) == sum(plain.launches.values()) and padded.launches["graph"] == graphs.replayed
    samplers = {(name[0], name[1]) for name in graphs._held if isinstance(name, tuple)}
    assert samplers >= {(4, Sampler.SAMPLE), (4, Sampler.CHANGED)}, "all buckets of four rows share them"


def test_a_request_gets_the_same_by_any_entry_and_without_those_of_draws(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone a step takes the cheapest entry that does what its request asks for; packages of before have two less."""
    stepper = PackageStepper(package, num_blocks=64, max_tokens=16, max_requests=4)
    called: list[str] = []
    call = Package.call

    def noting(self: Package, entry: str, *given: Any) -> Any:
        called.append(entry)
        return call(self, entry, *given)

    monkeypatch.setattr(Package, "call", noting)
    together = answers(stepper)
    alone = [answers(stepper, [number])[0] for number in range(len(KINDS))]
    assert alone == together
    assert {*called} == {"step", *SAMPLING}
    called.clear()
    for entry in (Sampler.DRAW, Sampler.CUT):
        del stepper.package.entries[entry]
    assert [answers(stepper, [number])[0] for number in range(len(KINDS))] == together
    assert {*called} == {"step", "likeliest", "sample", "sample_changed"}


def test_all_of_the_vocabulary(package: Path) -> None:
    """Of a step that is replayed too: probabilities of all tokens, in order."""
    stepper = PackageStepper(package, num_blocks=64, max_tokens=16, max_requests=4)
    stepper.graphs = stepper.graphs_of(again, BUCKETS)
    engine = Engine(stepper, prefix_cache=False)
    engine.submit([1, 2, 3], SamplingParams(temperature=0, max_tokens=4, logprobs=-1, prompt_logprobs=-1))
    scores: list[Score] = []
    while engine.unfinished:
        for delta in engine.step():
            scores += (*delta.prompt_scores, *delta.scores)
    assert len(scores) == 6 and stepper.launches["graph"] >= 2
    for score in scores:
        values = [value for _, _, value in score.top]
        assert sorted(token for token, _, _ in score.top) == list(range(256)) and values == sorted(values, reverse=True)
        assert np.exp(values).sum() == pytest.approx(1, abs=1e-5)
        assert score.logprob == pytest.approx(next(v for t, _, v in score.top if t == score.token), abs=1e-6)


class Small(ByteTokenizer):
    """Of fewer tokens than the model."""

    vocab_size = 100


@pytest.mark.parametrize("graphs", [False, True])
def test_tokens_that_the_tokenizer_lacks_never_come(package: Path, graphs: bool) -> None:
    """Log-probabilities are still those over the model's whole vocabulary: the same that scoring the text gives."""
    stepper = PackageStepper(package, num_blocks=64, seed=3, max_tokens=16, max_requests=4)
    stepper.graphs = stepper.graphs_of(again, BUCKETS) if graphs else None
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0, "logprobs": 5},
        {"temperature": 2.0, "seed": 1, "logprobs": 0},
        {"temperature": 2.0, "seed": 2, "logprobs": -1},
        {"temperature": 1.5, "seed": 3, "frequency_penalty": 1.0, "logit_bias": {200: 100.0}, "logprobs": 3},
        {"temperature": 0, "logit_bias": {99: 100.0, 100: 100.0}, "logprobs": 0},
    ]
    params = [SamplingParams(max_tokens=12, **kind) for kind in kinds]
    free = LLM.over(Engine(stepper)).generate([[5, 250, 7]] * 2, params[:3:2])
    assert all(max(output.outputs[0].token_ids) >= 100 for output in free), "the model likes others"
    found = LLM.over(Engine(stepper, Small())).generate([[5, 250, 7]] * len(kinds), params)
    assert (stepper.launches.get("graph", 0) > 10) is graphs
    for output in found:
        assert max(output.outputs[0].token_ids) < 100
    assert set(found[5].outputs[0].token_ids) == {99}
    for output, kind in zip(found[1:], kinds[1:], strict=True):
        (one,) = output.outputs
        scored = LLM.over(Engine(stepper)).generate(
            [[5, 250, 7, *one.token_ids]], {"max_tokens": 0, "prompt_logprobs": kind["logprobs"]}
        )[0]
        for score, expected in zip(one.logprobs or (), (scored.prompt_logprobs or ())[3:], strict=True):
            assert expected is not None and score.logprob == pytest.approx(expected.logprob, abs=1e-4)
            assert [top[2] for top in score.top] == pytest.approx([top[2] for top in expected.top], abs=1e-4)
    with pytest.raises(RequestError, match="leave no token"):
        LLM.over(Engine(stepper, Small())).generate([[5]], {"allowed_token_ids": [100, 101]})
    ended = Engine(stepper, Small(), ends_of_text=[120])
    (output,) = LLM.over(ended).generate([[5]], {"temperature": 0, "logit_bias": {120: 100.0, 121: 100.0}})
    assert output.outputs[0].token_ids == (120,), "what ends a text may come"


def test_a_bias_ends_with_its_request(package: Path) -> None:
    """The place that graphs read it from is cleared."""
    stepper = PackageStepper(package, num_blocks=64, max_tokens=16, max_requests=4)
    stepper.graphs = stepper.graphs_of(again, BUCKETS)
    engine = Engine(stepper, prefix_cache=False)
    biased = SamplingParams(temperature=0, max_tokens=6, allowed_token_ids=[9])
    punished = SamplingParams(temperature=0, max_tokens=6, frequency_penalty=1e-6)

    def tokens(*params: SamplingParams) -> list[list[int]]:
        said: dict[int, list[int]] = {engine.submit([1, 2, 3], one): [] for one in params}
        while engine.unfinished:
            for delta in engine.step():
                said[delta.group] += delta.tokens
        return list(said.values())

    free = tokens(SamplingParams(temperature=0, max_tokens=6))
    assert tokens(biased, biased) == [[9] * 6] * 2
    assert tokens(punished) == free and stepper.graphs._biased == 0


def test_texts_that_no_graph_holds_are_sampled_alone(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mgraph.runtime.serving.dispatch.TEXTS", (4, 8))
    plain = PackageStepper(package, num_blocks=64, max_tokens=16, max_requests=4)
    short = PackageStepper(package, num_blocks=64, max_tokens=16, max_requests=4)
    short.graphs = short.graphs_of(again, BUCKETS)
    assert answers(short) == answers(plain)
    assert short.launches[Why.LONG_TEXTS] > 3 and short.launches["graph"] > 3


def test_the_plan_is_in_the_package(package: Path) -> None:
    stepper = PackageStepper(package, num_blocks=8, max_tokens=64, max_requests=128)
    plan = stepper.package.manifest["graph_plan"]
    assert plan["graphs"] == 6 and 0 < plan["waste"] < 0.5
    assert set(stepper.graphs_of(again).buckets) == {Bucket(*b) for b in plan["buckets"]}


def test_the_cache_takes_no_more_than_is_free(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside it there is room for the largest step and its logits, and with graphs for these; else it says so."""
    planned = json.loads((package / "manifest.json").read_text())["graph_plan"]["memory"]
    beside = planned["steps"] + planned["logits"]
    monkeypatch.setattr(package_stepper, "free_bytes", lambda device: beside + 2**20)
    stepper = PackageStepper(package)
    assert stepper.num_blocks == int(0.9 * 2**20) // stepper.block_bytes
    stepper._captures = True
    with_graphs = beside + planned["pool"] + planned["graph"] * planned["graphs"]
    assert stepper._beside_the_cache(planned) == with_graphs > beside > 0
    monkeypatch.setattr(package_stepper, "free_bytes", lambda device: beside)
    with pytest.raises(OptionError, match="free beside the weights: steps and their graphs need"):
        PackageStepper(package)
    assert PackageStepper(package, num_blocks=3).num_blocks == 3


def test_a_server_of_few_requests_has_graphs_of_every_kind(package: Path) -> None:
    plain = PackageStepper(package, num_blocks=64, max_tokens=16, max_requests=3)
    few = PackageStepper(package, num_blocks=64, max_tokens=16, max_requests=3)
    few.graphs = few.graphs_of(again)
    assert answers(few) == answers(plain)
    assert {name for name in few.launches if name != "graph"} <= {Why.FIRST, Why.TOO_MANY_ROWS}
    assert few.launches["graph"] > 3


def test_a_package_of_several_ranks_needs_them(package: Path, tmp_path: Path) -> None:
    shutil.copytree(package, tmp_path / "spread")
    manifest = json.loads((package / "manifest.json").read_text())
    (tmp_path / "spread" / "manifest.json").write_text(json.dumps({**manifest, "mesh": {"tp": 2}}))
    with pytest.raises(MeshError, match="mesh tp=2 needs 2 processes, and 1 were started"):
        PackageStepper(tmp_path / "spread", num_blocks=8)


def test_a_capture_that_fails_is_said_and_everything_goes_on(package: Path) -> None:
    def failing(run: Callable[[], Sequence[Tensor]]) -> tuple[Callable[[], None], Sequence[Tensor]]:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    plain = PackageStepper(package, num_blocks=64, max_tokens=16, max_requests=4)
    broken = PackageStepper(package, num_blocks=64, max_tokens=16, max_requests=4)
    broken.graphs = broken.graphs_of(failing, BUCKETS)
    with pytest.warns(RuntimeWarning, match="without CUDA graphs: operation not permitted when stream is capturing"):
        assert answers(broken) == answers(plain)
    assert broken.graphs.failure == "operation not permitted when stream is capturing"
    assert broken.launches[f"{Why.FAILED}: {broken.graphs.failure}"] > 10 and "graph" not in broken.launches


class Pool:
    """A capture that fails as CUDA graphs do where all those are gone that shared its memory."""

    def __init__(self) -> None:
        self._graphs: list[weakref.ref[Callable[[], None]]] = []

    def __call__(self, run: Callable[[], Sequence[Tensor]]) -> tuple[Callable[[], None], Sequence[Tensor]]:
        if self._graphs and all(graph() is None for graph in self._graphs):
            raise RuntimeError("use_count > 0")
        replay, results = again(run)
        self._graphs.append(weakref.ref(replay))
        return replay, results


def test_graphs_outlive_a_step_of_many_rows(package: Path) -> None:
    """One that no graph holds, as of a prompt whose log-probabilities are asked for, amid steps that are captured."""
    stepper = PackageStepper(package, num_blocks=64, max_tokens=16, max_requests=4)
    stepper.graphs = stepper.graphs_of(Pool(), BUCKETS)
    engine = Engine(stepper, prefix_cache=False)
    writing = SamplingParams(temperature=0, max_tokens=8)
    for prompt in ([1, 2], [3, 4], [5, 6]):
        engine.submit(prompt, writing)
    for _ in range(4):
        engine.step()
    assert stepper.launches["graph"] > 0
    engine.submit(list(range(12)), SamplingParams(max_tokens=1, logprobs=0, prompt_logprobs=0))
    while engine.unfinished:
        engine.step()
    assert not stepper.graphs.failure and stepper.launches[Why.TOO_MANY_ROWS] > 0
    assert stepper.launches["graph"] > 3


@pytest.mark.parametrize("penalty", [0.0, 1.5])
def test_a_step_of_many_rows_says_what_the_next_one_reads(package: Path, penalty: float) -> None:
    """What a step without a graph has sampled is unknown to the host when the next one is replayed, and the other way
    round."""
    said: list[list[tuple[int, float]]] = []
    for graphs in (False, True):
        stepper = PackageStepper(package, num_blocks=64, max_tokens=16, max_requests=4)
        stepper.graphs = stepper.graphs_of(again, BUCKETS) if graphs else None
        ahead = Ahead(stepper)
        llm = LLM.over(Engine(cast(Stepper, ahead), prefix_cache=False))
        writing = SamplingParams(seed=1, max_tokens=16, logprobs=0, frequency_penalty=penalty)
        scored = SamplingParams(seed=2, max_tokens=6, logprobs=0, prompt_logprobs=0)
        outputs = llm.generate([[1, 2], [3, 4], [5] * 7, list(range(9))], [writing, writing, scored, scored])
        said.append([(s.token, s.logprob) for output in outputs for s in output.outputs[0].logprobs or ()])
        assert ahead.unknown > 20
    assert len(said[1]) == 2 * (16 + 6) and np.array(said[1]) == pytest.approx(np.array(said[0]), rel=0, abs=1e-4)
    assert stepper.launches[Why.TOO_MANY_ROWS] > 1 and stepper.launches["graph"] > 5


def test_inputs_lie_in_one_buffer() -> None:
    inputs = Inputs({"a": ((3,), np.int64), "b": ((2, 2), np.int32), "c": ((1,), np.float32)}, torch.device("cpu"))
    inputs.fill({"a": [1, -2, 3], "b": np.array([[1, 2], [3, 4]]), "c": [0.5]})
    assert inputs.tensors["a"].tolist() == [1, -2, 3]
    assert inputs.tensors["b"].tolist() == [[1, 2], [3, 4]] and inputs.tensors["b"].dtype is torch.int32
    assert inputs.tensors["c"].tolist() == [0.5]


def test_unknown_tokens_are_those_of_the_step_before() -> None:
    assert known(torch.tensor([5, -1, -3]), torch.tensor([7, 8, 9])).tolist() == [5, 7, 9]


def test_launches_are_read_while_steps_are_made(package: Path) -> None:
    """As /metrics does it, from another thread than that of the engine, which finds new reasons meanwhile."""
    graphs = PackageStepper(package, num_blocks=9).graphs_of(again, BUCKETS)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as thread:
            steps = thread.submit(lambda: graphs.eager.update(f"reason {n}" for n in range(20_000)))
            while not steps.done():
                assert graphs.launches["graph"] == 0
    finally:
        sys.setswitchinterval(interval)
    assert sum(graphs.launches.values()) == 20_000
