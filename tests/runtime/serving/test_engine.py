"""The engine on a stepper without a model: whatever arrives when, each request gives what it gives alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mgraph.runtime.serving.blocks import most_blocks
from mgraph.runtime.serving.engine import LEAST_LOGPROB, Delta, Engine, EngineDead
from mgraph.runtime.serving.parameters import RequestError, SamplingParams
from mgraph.runtime.serving.request import Happening
from mgraph.runtime.serving.scheduler import most_rows
from mgraph.runtime.serving.step import Batch, Pending, Sampling
from mgraph.runtime.tokenizer import ByteTokenizer
from tests.runtime.serving.fake_stepper import FakeStepper, alone, log_softmax, spoken_logits, text_alone

VOCAB = 64
GROUPS = [(None,), (None,), (6,), (1,), (None, 9), (None, 4, 2), (11, 3)]
"""Windows of groups of layers."""
LONGEST = 52
"""Tokens of `arrivals` in the cache, at most."""


@dataclass
class Gathered:
    """What all deltas of one continuation say together."""

    tokens: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    prompt_scores: list[float] = field(default_factory=list)
    text: str = ""
    ends: list[Delta] = field(default_factory=list)


def gather(deltas: Sequence[Delta], into: dict[tuple[int, int], Gathered]) -> None:
    for delta in deltas:
        seen = into.setdefault((delta.group, delta.index), Gathered())
        assert not seen.ends, "something came after the end"
        seen.tokens += delta.tokens
        seen.scores += [score.logprob for score in delta.scores]
        seen.prompt_scores += [score.logprob for score in delta.prompt_scores]
        seen.text += delta.text
        if delta.finish_reason is not None:
            seen.ends.append(delta)


def run_all(engine: Engine, limit: int = 5000) -> dict[tuple[int, int], Gathered]:
    """Step until nothing is left."""
    found: dict[tuple[int, int], Gathered] = {}
    for _ in range(limit):
        if not engine.unfinished:
            return found
        gather(engine.step(), found)
        engine.scheduler.check()
    raise AssertionError("it does not end")


def given_back(engine: Engine) -> None:
    """An engine with nothing to do holds nothing."""
    pool = engine.scheduler.pool
    assert pool.available == pool.usable and not engine.scheduler.running and not engine.scheduler.waiting
    assert not engine._sequences and not engine._groups and not engine._builder._tables


@dataclass(frozen=True)
class Arrival:
    """A request, the step that it comes before, and after how many more it is aborted."""

    step: int
    prompt: list[int]
    params: SamplingParams
    aborted: int | None


def wishes(source: random.Random, seed: int) -> SamplingParams:
    """Parameters, each other than usual now and then. Of few letters words and stop strings come up often."""
    temperature, count = source.choice([0.0, 1.0]), source.randint(1, 20)
    letters = source.choice(["", "", "0123"])
    words = ["".join(source.choices(letters, k=source.choice([1, 2, 2, 3]))) for _ in range(5 if letters else 0)]
    return SamplingParams(
        n=source.choice([1, 1, 1, 3]) if temperature else 1,
        temperature=temperature,
        repetition_penalty=source.choice([1.0, 1.0, 1.7]),
        presence_penalty=source.choice([0.0, 0.0, 1.5]),
        frequency_penalty=source.choice([0.0, 0.0, 0.8]),
        seed=seed,
        max_tokens=count,
        min_tokens=min(source.choice([0, 4]), count),
        stop=words[: source.choice([0, 2])],
        include_stop_str_in_output=source.choice([False, True]),
        logprobs=0,
        prompt_logprobs=source.choice([None, None, 0]),
        allowed_token_ids=list(letters.encode()) or None,
        bad_words=words[2 : source.choice([2, 3, 5])],
    )


@st.composite
def arrivals(draw: st.DrawFn) -> list[Arrival]:
    """Requests whose beginnings are often shared."""
    source = random.Random(draw(st.integers(0, 2**32)))
    common = [source.randrange(VOCAB) for _ in range(24)]
    made = []
    for seed in range(draw(st.integers(1, 9))):
        shared = common[: source.choice([0, 0, 3, 4, 8, 9, 16, 24])]
        prompt = shared + [source.randrange(VOCAB) for _ in range(source.choice([1, 2, 5, 9, 0 if shared else 3]))]
        aborted = source.choice([None, None, None, 0, 1, 5])
        made.append(Arrival(source.randint(0, 12), prompt, wishes(source, seed), aborted))
    return sorted(made, key=lambda item: item.step)


@settings(max_examples=120, deadline=None)
@given(
    arrivals(),
    st.sampled_from(GROUPS),
    st.sampled_from([0, 2, 6, 46]),
    st.integers(1, 5),
    st.sampled_from([5, 7, 16, 40]),
    st.booleans(),
    st.booleans(),
)
def test_each_gives_what_it_gives_alone(
    plan: list[Arrival],
    windows: Sequence[int | None],
    spare: int,
    max_requests: int,
    max_tokens: int,
    prefix_cache: bool,
    asynchronous: bool,
) -> None:
    stepper = FakeStepper(
        num_blocks=1 + most_blocks(windows, 4, LONGEST, 1) + spare,
        windows=windows,
        max_requests=max_requests,
        max_tokens=max_tokens,
        asynchronous=asynchronous,
        max_length=64,
    )
    engine = Engine(stepper, ByteTokenizer(), prefix_cache=prefix_cache)
    found: dict[tuple[int, int], Gathered] = {}
    groups: dict[int, Arrival] = {}
    everything = []
    for step in range(4000):
        for arrival in plan:
            if arrival.step == step:
                group = engine.submit(arrival.prompt, arrival.params)
                groups[group] = arrival
                everything += [s.request for s in engine._groups[group].values()]
        for group, arrival in groups.items():
            if arrival.aborted is not None and arrival.step + arrival.aborted == step:
                gather(engine.abort(group), found)
        gather(engine.step(), found)
        engine.scheduler.check()
        if not engine.unfinished and step > 12:
            break
    else:
        raise AssertionError("some request starves")
    given_back(engine)
    assert len(found) == sum(arrival.params.n for arrival in plan)
    for (group, index), seen in found.items():
        prompt, params = groups[group].prompt, groups[group].params
        seed = ((params.seed or 0) + index * 0x9E3779B97F4A7C15) % 2**63
        tokens, scores = alone(stepper.logits, prompt, params, params.max_tokens or 0, seed=seed)
        text, stop = text_alone(params, tokens)
        scored = range(1, len(prompt)) if params.prompt_logprobs is not None and index == 0 else ()
        of_prompt = [log_softmax(stepper.logits(prompt[:at]))[prompt[at]] for at in scored]
        (end,) = seen.ends
        if end.finish_reason == "abort":
            tokens, scores, text = tokens[: len(seen.tokens)], scores[: len(seen.tokens)], text[: len(seen.text)]
            of_prompt = of_prompt[: len(seen.prompt_scores)]
        else:
            assert (end.error, end.finish_reason, end.stop_reason) == (None, "stop" if stop else "length", stop)
        assert (seen.tokens, seen.text) == (tokens, text)
        assert seen.scores == pytest.approx(scores, abs=1e-5)
        assert seen.prompt_scores == pytest.approx(of_prompt, abs=1e-5)
    for request in everything:
        what = [event.what for event in request.events]
        assert what[0] is Happening.ARRIVED and what[-1] is Happening.ENDED and what.count(Happening.ENDED) == 1
        assert abs(what.count(Happening.ADMITTED) - what.count(Happening.PREEMPTED)) <= 1
        times = [event.when for event in request.events]
        assert times == sorted(times)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, 8, 0])
def test_a_long_text_holds_no_more_than_its_window(chunk: int, asynchronous: bool) -> None:
    """A cache that is much too small for the text, and enough for the window, serves it; where it is too small for a
    chunk as well, chunks are shorter."""
    window, size, length = 10, 4, 150
    step = chunk or 32
    most = -(-(window + step) // size) + 1
    for num_blocks in (1 + most, 1 + most_blocks([window], size, length, 1)):
        stepper = FakeStepper(
            num_blocks=num_blocks, windows=(window,), max_length=200, max_tokens=32, asynchronous=asynchronous
        )
        engine = Engine(stepper, chunk=chunk)
        prompt = [at * at % VOCAB for at in range(length - 40)]
        group = engine.submit(prompt, SamplingParams(temperature=0, max_tokens=40))
        found: dict[tuple[int, int], Gathered] = {}
        held = 0
        while engine.unfinished:
            gather(engine.step(), found)
            engine.scheduler.check()
            held = max([held, *(request.tables.held for request in engine.scheduler.running)])
        assert engine.longest == 200 and length / size > 2 * stepper.num_blocks
        assert found[group, 0].tokens == alone(stepper.logits, prompt, SamplingParams(temperature=0), 40)[0]
        assert held <= most and not engine.scheduler.counts.preemptions
        given_back(engine)


def test_a_hit_needs_the_last_window_alone() -> None:
    """What lay before the window has been overwritten in the meantime."""
    stepper = FakeStepper(num_blocks=16, windows=(8,), max_length=200)
    engine = Engine(stepper)
    prompt = [at * 7 % VOCAB for at in range(100)]
    first = engine.submit(prompt, SamplingParams(temperature=0, max_tokens=1))
    tokens = run_all(engine)[first, 0].tokens
    computed = stepper.computed
    again = engine.submit([*prompt, *tokens, 5], SamplingParams(temperature=0, max_tokens=3))
    found = run_all(engine)[again, 0]
    assert found.ends[0].cached == 100 and stepper.computed == computed + 4
    assert found.tokens == alone(stepper.logits, [*prompt, *tokens, 5], SamplingParams(temperature=0), 3)[0]
    shorter = engine.submit([*prompt[:50], 5], SamplingParams(temperature=0, max_tokens=3))
    found = run_all(engine)[shorter, 0]
    assert found.ends[0].cached < 50
    assert found.tokens == alone(stepper.logits, [*prompt[:50], 5], SamplingParams(temperature=0), 3)[0]
    given_back(engine)


def test_a_prompt_is_admitted_where_those_before_leave_room_for_it() -> None:
    """Prompts of ten blocks in chunks of one, in a cache of fifteen: the next one waits until what the one before has
    still to compute is counted, and nobody is sent away."""
    stepper = FakeStepper(num_blocks=16, max_requests=4, max_length=200)
    engine = Engine(stepper, chunk=stepper.block_size)
    groups = [
        engine.submit([at + 3] * (10 * stepper.block_size - 1), SamplingParams(temperature=0, max_tokens=1))
        for at in range(4)
    ]
    found = run_all(engine)
    assert all(len(found[group, 0].tokens) == 1 for group in groups)
    assert engine.scheduler.counts.preemptions == 0
    given_back(engine)


def test_tight_caches_preempt_and_ample_ones_share() -> None:
    """The test above proves little where nothing is sent away or shared."""
    tight = Engine(FakeStepper(num_blocks=14, max_requests=4))
    for at in range(4):
        tight.submit([at] * 9, SamplingParams(max_tokens=20, seed=at))
    run_all(tight)
    assert tight.scheduler.counts.preemptions >= 3
    ample = Engine(FakeStepper(num_blocks=60))
    ample.submit(list(range(16)), SamplingParams(max_tokens=2))
    run_all(ample)
    for extra in range(4):
        ample.submit([*range(16), 20 + extra], SamplingParams(max_tokens=2))
    run_all(ample)
    counts = ample.scheduler.counts
    assert (counts.prefix_queries, counts.prefix_hits) == (16 + 4 * 17, 4 * 16)


@pytest.mark.parametrize("budget", [2, 3, 5, 8, 16])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_chunks_of_any_size(budget: int, asynchronous: bool) -> None:
    """Each token of a prompt is computed once, and those that write get a token in every step meanwhile."""
    for length in range(1, 41, 3):
        stepper = FakeStepper(max_requests=2, max_tokens=budget, asynchronous=asynchronous, num_blocks=64)
        engine = Engine(stepper, prefix_cache=False)
        prompt = [(7 * i + length) % VOCAB for i in range(length)]
        first = engine.submit([1], SamplingParams(max_tokens=50, temperature=0))
        found: dict[tuple[int, int], Gathered] = {}
        while not found:
            gather(engine.step(), found)
        second = engine.submit(prompt, SamplingParams(max_tokens=3, temperature=0, logprobs=0, prompt_logprobs=0))
        for _ in range(-(-length // (budget - 1))):
            before = len(found[first, 0].tokens)
            gather(engine.step(), found)
            assert len(found[first, 0].tokens) == min(before + 1, 50)
        gathered = run_all(engine)
        found[first, 0].tokens += gathered[first, 0].tokens if (first, 0) in gathered else []
        seen = found.get((second, 0), Gathered())
        tokens = seen.tokens + gathered.get((second, 0), Gathered()).tokens
        scores = seen.scores + gathered.get((second, 0), Gathered()).scores
        expected, expected_scores = alone(stepper.logits, prompt, SamplingParams(temperature=0), 3)
        assert tokens == expected and scores == pytest.approx(expected_scores, abs=1e-5)
        prompt_scores = seen.prompt_scores + gathered.get((second, 0), Gathered()).prompt_scores
        dense = [log_softmax(stepper.logits(prompt[:at]))[prompt[at]] for at in range(1, length)]
        assert prompt_scores == pytest.approx(dense, abs=1e-5)
        assert found[first, 0].tokens == alone(stepper.logits, [1], SamplingParams(temperature=0), 50)[0]
        assert stepper.computed <= length + 2 + 50 + 2 * asynchronous


@pytest.mark.parametrize("windows", [(None,), (7,), (None, 9)])
def test_several_continuations_share_the_prompt(windows: Sequence[int | None]) -> None:
    stepper = FakeStepper(num_blocks=64, max_requests=8, windows=windows)
    engine = Engine(stepper)
    prompt = list(range(33))
    group = engine.submit(prompt, SamplingParams(n=5, seed=11, max_tokens=6))
    found = run_all(engine)
    assert len({tuple(found[group, at].tokens) for at in range(5)}) == 5
    for at in range(5):
        seed = (11 + at * 0x9E3779B97F4A7C15) % 2**63
        assert found[group, at].tokens == alone(stepper.logits, prompt, SamplingParams(), 6, seed=seed)[0]
    assert stepper.computed == 33 + 4 * 1 + 5 * 5, "four of them find the whole blocks of the prompt"
    given_back(engine)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_penalties_and_seeds_do_not_depend_on_the_batch(asynchronous: bool) -> None:
    asked = [
        SamplingParams(seed=3, max_tokens=12, repetition_penalty=1.7),
        SamplingParams(seed=4, max_tokens=12, presence_penalty=1.0, frequency_penalty=0.5),
        SamplingParams(temperature=0, max_tokens=12, frequency_penalty=2.0),
        SamplingParams(seed=3, max_tokens=12),
    ]
    stepper = FakeStepper(num_blocks=18, asynchronous=asynchronous)
    engine = Engine(stepper)
    groups = [engine.submit([1, 2, 3, at], params) for at, params in enumerate(asked)]
    found = run_all(engine)
    for at, (group, params) in enumerate(zip(groups, asked, strict=True)):
        expected = alone(stepper.logits, [1, 2, 3, at], params, 12, seed=params.seed or 0)[0]
        assert found[group, 0].tokens == expected


@pytest.mark.parametrize("asynchronous", [False, True])
def test_constraints(asynchronous: bool) -> None:
    """min_tokens forbids every end; allowed tokens, bias and words forbid what they say."""
    engine = Engine(
        FakeStepper(vocab_size=256, asynchronous=asynchronous, num_blocks=64), ByteTokenizer(), ends_of_text=[0]
    )
    ends = engine.submit([5], SamplingParams(temperature=0, max_tokens=20, min_tokens=3, logit_bias={0: 100, 9: 90}))
    only = engine.submit([5], SamplingParams(max_tokens=20, allowed_token_ids=[65, 66], seed=1))
    words = engine.submit([5], SamplingParams(max_tokens=20, allowed_token_ids=[65, 66], bad_words=["AB"], seed=1))
    stop = engine.submit([5], SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[7], logit_bias={7: 100}))
    turns = engine.submit([5], SamplingParams(max_tokens=9, allowed_token_ids=[65, 66], bad_words=["AB", "BA"], seed=1))
    gives = engine.submit([5], SamplingParams(max_tokens=9, allowed_token_ids=[65], bad_words=["AA"], seed=1))
    found = run_all(engine)
    assert len(set(found[turns, 0].text)) == 1, "neither after the other"
    assert found[gives, 0].text == "A" * 9, "rather than what is not allowed"
    assert found[ends, 0].tokens == [9, 9, 9, 0] and found[ends, 0].ends[0].finish_reason == "stop"
    assert found[ends, 0].text == "\t\t\t"
    assert set(found[only, 0].text) == {"A", "B"} and "AB" in found[only, 0].text
    assert "A" in found[words, 0].text and "AB" not in found[words, 0].text, "after an A there is no B"
    assert (found[stop, 0].tokens, found[stop, 0].text, found[stop, 0].ends[0].stop_reason) == ([7], "", 7)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_words_of_several_tokens_wait_for_those_before(asynchronous: bool) -> None:
    """The model says ABC ever again. Whether C may come depends on a B that is under way; others go on meanwhile."""
    stepper = FakeStepper(vocab_size=256, logits=spoken_logits(b"ABC"), asynchronous=asynchronous, num_blocks=64)
    engine = Engine(stepper, ByteTokenizer())
    greedy = SamplingParams(temperature=0, max_tokens=9, allowed_token_ids=[65, 66, 67])
    words = engine.submit([0], replace(greedy, bad_words=["ABC"]))
    other = engine.submit([0], greedy)
    found = run_all(engine)
    assert (found[words, 0].text, found[other, 0].text) == ("ABAABAABA", "ABCABCABC")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_stop_string_ends_in_its_step(asynchronous: bool) -> None:
    engine = Engine(
        FakeStepper(vocab_size=256, logits=spoken_logits("grün STOP and on ".encode()), asynchronous=asynchronous),
        ByteTokenizer(),
    )
    cut = engine.submit([0], SamplingParams(temperature=0, max_tokens=40, stop=["STOP", "never"]))
    kept = engine.submit([0], SamplingParams(temperature=0, max_tokens=40, stop="P", include_stop_str_in_output=True))
    full = engine.submit([0], SamplingParams(temperature=0, max_tokens=3))
    found = run_all(engine)
    assert (found[cut, 0].text, len(found[cut, 0].tokens)) == ("grün ", 10)
    assert found[cut, 0].ends[0].stop_reason == "STOP"
    assert found[kept, 0].text == "grün STOP"
    assert (found[full, 0].text, found[full, 0].ends[0].finish_reason) == ("gr\ufffd", "length")


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("least", "text"), [(2, ""), (3, "ab "), (5, "ab "), (6, "ab ab "), (9, "ab ab ab ")])
def test_no_stop_string_ends_before_the_least_tokens(least: int, text: str, asynchronous: bool) -> None:
    """It may be complete with the last of them, and begins no earlier than that where it is complete later."""
    stepper = FakeStepper(vocab_size=256, logits=spoken_logits(b"ab "), asynchronous=asynchronous)
    engine = Engine(stepper, ByteTokenizer())
    group = engine.submit([0], SamplingParams(temperature=0, max_tokens=12, min_tokens=least, stop="b"))
    (said,) = run_all(engine).values()
    assert said.text == text + "a" and len(said.tokens) == max(least, len(text) + 2)
    assert (said.ends[0].group, said.ends[0].finish_reason, said.ends[0].stop_reason) == (group, "stop", "b")


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("windows", [(None,), (5,), (None, 5)])
def test_a_failed_step_ends_its_requests_alone(windows: Sequence[int | None], asynchronous: bool) -> None:
    stepper = FakeStepper(asynchronous=asynchronous, failing=[3], num_blocks=20, windows=windows)
    engine = Engine(stepper)
    lost = [engine.submit([at] * 9, SamplingParams(max_tokens=9)) for at in range(2)]
    found: dict[tuple[int, int], Gathered] = {}
    while engine.unfinished:
        gather(engine.step(), found)
        engine.scheduler.check()
    assert [found[group, 0].ends[0].finish_reason for group in lost] == ["error"] * 2
    assert "on fire" in (found[lost[0], 0].ends[0].error or "")
    given_back(engine)
    again = engine.submit([0] * 9, SamplingParams(max_tokens=9, seed=0))
    assert run_all(engine)[again, 0].tokens == alone(stepper.logits, [0] * 9, SamplingParams(), 9)[0]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_step_that_cannot_be_launched_ends_its_requests_alone(asynchronous: bool) -> None:
    """The last token of another request is still under way then, and comes."""
    stepper = FakeStepper(asynchronous=asynchronous, refused=[3], num_blocks=40)
    engine = Engine(stepper)
    greedy = SamplingParams(temperature=0, max_tokens=2)
    whole, found = engine.submit([1, 2], greedy), dict[tuple[int, int], Gathered]()
    for _ in range(2):
        gather(engine.step(), found)
    lost = engine.submit([5, 6, 7], greedy)
    while engine.unfinished:
        gather(engine.step(), found)
        engine.scheduler.check()
    assert found[whole, 0].tokens == alone(stepper.logits, [1, 2], greedy, 2)[0]
    assert found[whole, 0].ends[0].finish_reason == "length"
    assert found[lost, 0].ends[0].finish_reason == "error" and "no memory" in (found[lost, 0].ends[0].error or "")
    given_back(engine)


def test_an_engine_whose_steps_fail_is_dead() -> None:
    engine = Engine(FakeStepper(failing=range(100), max_requests=1))
    groups = [engine.submit([at], SamplingParams()) for at in range(5)]
    found = run_all(engine)
    assert [found[group, 0].ends[0].finish_reason for group in groups] == ["error"] * 5
    with pytest.raises(EngineDead, match="on fire"):
        engine.submit([1], SamplingParams())
    given_back(engine)


def test_what_cannot_be_served_is_refused() -> None:
    engine = Engine(FakeStepper(num_blocks=9, max_length=64))
    assert engine.longest == 33
    wrong: list[tuple[list[int], SamplingParams, str]] = [
        ([], SamplingParams(), "empty"),
        ([64], SamplingParams(), "token 64"),
        ([-1], SamplingParams(), "token -1"),
        ([1] * 33, SamplingParams(max_tokens=1), "33 tokens.*maximum context length is 33"),
        ([1] * 20, SamplingParams(max_tokens=14), "34 were asked for: 20 in the prompt, 14"),
        ([1], SamplingParams(stop_token_ids=[64]), "stop_token_ids has token 64"),
        ([1], SamplingParams(allowed_token_ids=[64]), "allowed_token_ids has token 64"),
        ([1], SamplingParams(bad_words=["x"]), "need a tokenizer"),
        ([1], SamplingParams(min_tokens=1, allowed_token_ids=[7], stop_token_ids=[7]), "min_tokens forbids the only"),
        ([1] * 30, SamplingParams(max_tokens=None, min_tokens=9), "min_tokens 9"),
    ]
    for prompt, params, message in wrong:
        with pytest.raises(RequestError, match=message):
            engine.submit(prompt, params)
    assert not engine.unfinished
    given_back(engine)
    fits = engine.submit([1] * 20, SamplingParams(max_tokens=None))
    assert len(run_all(engine)[fits, 0].tokens) == 13


def test_alternatives_hold_the_likeliest() -> None:
    stepper = FakeStepper()
    engine = Engine(stepper)
    group = engine.submit([3, 4], SamplingParams(max_tokens=1, logprobs=3, prompt_logprobs=2, seed=5))
    (delta,) = [d for d in (engine.step(), engine.step())[0] if d.group == group]
    dense = log_softmax(stepper.logits([3, 4]))
    order = (-dense).argsort()[:3].tolist()
    assert [t for t, _, _ in delta.scores[0].top] == order
    assert [p for _, _, p in delta.scores[0].top] == pytest.approx(dense[order].tolist(), abs=1e-5)
    assert delta.prompt_scores[0].token == 4 and len(delta.prompt_scores[0].top) == 2


def test_all_of_the_vocabulary() -> None:
    """-1 gives every token; whoever asks for fewer in the same step gets these."""
    stepper = FakeStepper()
    engine = Engine(stepper)
    everything = engine.submit([3, 4], SamplingParams(max_tokens=1, logprobs=-1, prompt_logprobs=-1, seed=5))
    some = engine.submit([3, 4], SamplingParams(max_tokens=1, logprobs=2, seed=5))
    deltas = {d.group: d for d in (engine.step(), engine.step())[0]}
    dense = log_softmax(stepper.logits([3, 4]))
    top = deltas[everything].scores[0].top
    assert [t for t, _, _ in top] == (-dense).argsort(kind="stable").tolist()
    assert [p for _, _, p in top] == pytest.approx(sorted(dense.tolist(), reverse=True), abs=1e-5)
    assert len(deltas[everything].prompt_scores[0].top) == VOCAB and deltas[some].scores[0].top == top[:2]


@pytest.mark.parametrize("num_blocks", [12, 40])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_log_probabilities_of_prompts_come_in_parts(num_blocks: int, asynchronous: bool) -> None:
    """A step has few rows of logits, however many tokens; the values are those of one piece. Nobody starves."""
    widths: list[int] = []

    class Measuring(FakeStepper):
        def run(self, batch: Batch, sampling: Sampling) -> Pending:
            widths.append(len(batch.rows))
            return super().run(batch, sampling)

    stepper = Measuring(num_blocks=num_blocks, max_tokens=32, asynchronous=asynchronous)
    engine = Engine(stepper)
    source = random.Random(num_blocks)
    prompts = [[source.randrange(VOCAB) for _ in range(length)] for length in (30, 2, 25, 40, 1, 11)]
    wanted = [0, 0, None, 0, 0, None]
    groups = [
        engine.submit(prompt, SamplingParams(max_tokens=4, temperature=0, prompt_logprobs=asked))
        for prompt, asked in zip(prompts, wanted, strict=True)
    ]
    found = run_all(engine)
    for group, prompt, asked in zip(groups, prompts, wanted, strict=True):
        tokens, _ = alone(stepper.logits, prompt, SamplingParams(temperature=0), 4)
        assert found[group, 0].tokens == tokens
        dense = [log_softmax(stepper.logits(prompt[:at]))[prompt[at]] for at in range(1, len(prompt))]
        assert found[group, 0].prompt_scores == pytest.approx([] if asked is None else dense, abs=1e-5)
    assert max(widths) <= most_rows(stepper.max_requests) < 30
    given_back(engine)


def test_what_json_cannot_write_is_not_given() -> None:
    """Tokens that cannot come have minus infinity, and a model that is broken gives nan."""

    def logits(tokens: Sequence[int]) -> NDArray[np.float64]:
        row = np.full(VOCAB, -np.inf)
        row[len(tokens) % VOCAB] = 0
        return row if len(tokens) < 4 else np.full(VOCAB, np.nan)

    engine = Engine(FakeStepper(logits=logits))
    group = engine.submit([1, 2], SamplingParams(max_tokens=4, temperature=0, logprobs=3, prompt_logprobs=2))
    deltas = engine.step()
    while engine.unfinished:
        deltas += engine.step()
    scores = [score for delta in deltas if delta.group == group for score in (*delta.scores, *delta.prompt_scores)]
    values = [value for score in scores for value in (score.logprob, *(p for _, _, p in score.top))]
    assert len(scores) == 5 and LEAST_LOGPROB in values and 0.0 in values
    assert all(np.isfinite(value) for value in values)


@pytest.mark.parametrize("padded", [True, False])
def test_tokens_that_a_tokenizer_lacks_are_padding_or_may_come(padded: bool) -> None:
    engine = Engine(FakeStepper(vocab_size=300), ByteTokenizer(), padded=padded)
    engine.submit([1, 2, 3], SamplingParams(max_tokens=40, temperature=0))
    tokens = [token for one in run_all(engine).values() for token in one.tokens]
    assert len(tokens) == 40 and (max(tokens) < 256) == padded
