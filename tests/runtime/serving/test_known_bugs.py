"""Bugs that users of other engines have met again and again: one test for each class that can be had here.

Each says in its docstring what the class is; all run on a stepper without a model, whose next token depends on all that
it reads through the block tables. Of classes that need more than that, the tests are elsewhere:

* what captured graphs read of padding and of steps before: also test_step_graphs.py, with NaN in the padded block, and
  test_gpu.py, bit for bit
* ranks that choose different graphs and wait for each other for ever: test_ranks.py; rank 0 alone decides
* memory that captured graphs take: what the plan counts is in tests/test_serving_plan.py
* clients that go away, and errors in a stream: test_server.py; signals, and a server that does not end: test_program.py
* wrong and over-long input: the 70 bodies of test_server.py, and test_openapi.py

Not here: slots of recurrent states taken by the wrong index, and pipelines of uneven stages (nothing like that is
served); memory that is unmapped while collectives are captured (nothing is unmapped); tensors saved for a backward
(there is none); temporary copies of moved caches (caches are never moved).
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from mgraph.runtime.serving.answers import Chats, Completions, Echo, event
from mgraph.runtime.serving.dispatch import Bucket
from mgraph.runtime.serving.engine import Delta, Engine
from mgraph.runtime.serving.parameters import RequestError, SamplingParams
from mgraph.runtime.serving.step import Batch
from mgraph.runtime.serving.step_graphs import StepGraphs
from mgraph.runtime.tokenizer import ByteTokenizer, FileTokenizer
from tests.runtime.serving.fake_stepper import FakeStepper, alone, log_softmax, spoken_logits
from tests.runtime.serving.test_engine import VOCAB, Gathered, gather, given_back, run_all

GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=0)


def batch(requests: int, length: int) -> Batch:
    """A step that only writes: each request has `length` tokens, the last one new, in blocks of 4."""
    blocks = np.zeros((requests, 8), np.int32)
    used = -(-length // 4)
    blocks[:, :used] = 1 + np.arange(requests * used).reshape(requests, used)
    return Batch(
        tokens=np.arange(requests, dtype=np.int64) + 5,
        positions=np.full(requests, length - 1),
        slots=((blocks[:, used - 1] * 4 + (length - 1) % 4).astype(np.int64),),
        starts=np.arange(requests + 1, dtype=np.int32),
        lengths=np.full(requests, length, np.int32),
        blocks=(blocks,),
        rows=np.arange(requests),
        requests=tuple(range(requests)),
    )


def test_padding_and_what_a_larger_step_left_behind() -> None:
    """Rows that pad a step point at blocks of requests, or at what a larger step wrote there before.

    A large step, then a small one in the same bucket: all padding writes to block 0, has no tokens and no blocks.
    """
    graphs = StepGraphs(
        lambda *_: [], lambda *_: [], [Bucket(8, 8, True)], 8, 8, 4, torch.device("cpu"), lambda run: run
    )
    graphs.padded(batch(8, 30), Bucket(8, 8, True))
    small = graphs.padded(batch(3, 6), Bucket(8, 8, True))
    assert (small["slots"][3:] < 4).all() and (small["blocks"][3:] == 0).all() and (small["blocks"][:, 2:] == 0).all()
    assert (small["lengths"][3:] == 0).all() and small["starts"][3:].tolist() == [3] * 6
    assert small["slots"][:3].tolist() == batch(3, 6).slots[0].tolist() and (small["slots"][:3] >= 4).all()


@pytest.mark.parametrize("budget", range(2, 9))
def test_every_length_in_every_chunk(budget: int) -> None:
    """A chunk of a single token, the last above all, is taken for one that writes; or a chunk goes to a wrong slot.

    Every length up to two chunks and a bit, beside a request that writes, with log-probabilities of the prompt.
    """
    for length in range(1, 2 * budget + 3):
        stepper = FakeStepper(num_blocks=40, max_tokens=budget, max_requests=2, asynchronous=bool(length % 2))
        engine = Engine(stepper, prefix_cache=False)
        prompt = [(5 * at + length) % VOCAB for at in range(length)]
        other = engine.submit([9], SamplingParams(temperature=0, max_tokens=20))
        params = SamplingParams(temperature=0, max_tokens=3, logprobs=0, prompt_logprobs=0)
        group = engine.submit(prompt, params)
        found = run_all(engine)
        tokens, scores = alone(stepper.logits, prompt, GREEDY, 3)
        dense = [log_softmax(stepper.logits(prompt[:at]))[prompt[at]] for at in range(1, length)]
        assert found[group, 0].tokens == tokens and found[group, 0].scores == pytest.approx(scores, abs=1e-5)
        assert found[group, 0].prompt_scores == pytest.approx(dense, abs=1e-5)
        assert found[other, 0].tokens == alone(stepper.logits, [9], GREEDY, 20)[0]


def pressed(prefix_cache: bool, num_blocks: int, asynchronous: bool) -> tuple[list[Gathered], Engine]:
    """40 requests over few beginnings, some of which are those of others with one token changed, on few blocks."""
    source = random.Random(7)
    engine = Engine(
        FakeStepper(num_blocks=num_blocks, max_requests=4, asynchronous=asynchronous), prefix_cache=prefix_cache
    )
    beginnings = [[source.randrange(VOCAB) for _ in range(12)] for _ in range(3)]
    beginnings += [[b[0] ^ 1, *b[1:]] for b in beginnings] + [beginnings[0][4:8] * 3]
    groups = []
    for at in range(40):
        prompt = [*source.choice(beginnings), *(source.randrange(VOCAB) for _ in range(source.randrange(4)))]
        params = SamplingParams(seed=at, max_tokens=source.randint(1, 24), logprobs=0)
        groups.append(engine.submit(prompt, params))
    found = run_all(engine)
    given_back(engine)
    return [found[group, 0] for group in groups], engine


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_prefix_cache_that_gives_something_else(asynchronous: bool) -> None:
    """A block is found by too little (its tokens without what came before), or is overwritten while it is found."""
    without, _ = pressed(False, 60, asynchronous)
    tight, engine = pressed(True, 14, asynchronous)
    assert [one.tokens for one in tight] == [one.tokens for one in without]
    assert engine.scheduler.counts.prefix_hits > 50, "it proves little where nothing is found"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_preemption_that_changes_the_output(asynchronous: bool) -> None:
    """What is computed anew samples a token twice, loses log-probabilities, or gives others."""
    ample, _ = pressed(False, 60, asynchronous)
    tight, engine = pressed(False, 12, asynchronous)
    assert engine.scheduler.counts.preemptions > 10
    for one, other in zip(ample, tight, strict=True):
        assert one.tokens == other.tokens and len(other.scores) == len(other.tokens)
        assert other.scores == pytest.approx(one.scores, abs=1e-5)


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_prompt_that_is_scored_twice(asynchronous: bool, prefix_cache: bool) -> None:
    """Log-probabilities of a prompt that was preempted, in the midst of it or after, come again with its tokens."""
    engine = Engine(FakeStepper(num_blocks=14, asynchronous=asynchronous), prefix_cache=prefix_cache)
    prompts = [[3 * at + 1] * 4 + list(range(at, at + more)) for at, more in enumerate((2, 3, 20, 18, 5))]
    params = SamplingParams(temperature=0, max_tokens=14, prompt_logprobs=0)
    groups = [engine.submit(prompt, params) for prompt in prompts]
    requests = [engine._groups[group][0].request for group in groups]
    found: dict[tuple[int, int], Gathered] = {}
    seen: dict[int, int] = {}
    while engine.unfinished:
        gather(engine.step(), found)
        for request in requests:
            if request.preempted:
                seen.setdefault(request.number, len(request.output))
    stepper = engine.stepper
    assert isinstance(stepper, FakeStepper) and 0 in seen.values() and max(seen.values()) > 0
    for group, prompt in zip(groups, prompts, strict=True):
        dense = [log_softmax(stepper.logits(prompt[:at]))[prompt[at]] for at in range(1, len(prompt))]
        assert found[group, 0].prompt_scores == pytest.approx(dense, abs=1e-5)
        assert found[group, 0].tokens == alone(stepper.logits, prompt, GREEDY, 14)[0]
    given_back(engine)


@pytest.mark.parametrize("how", ["abort", "fail"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_blocks_lost_or_given_back_twice(how: str, asynchronous: bool) -> None:
    """An end at an unlucky moment (in a chunk, under way, preempted, waiting) leaks blocks or frees them twice.

    One request ends, or the step fails, before each step there is; the others go on as if alone.
    """
    for moment in range(1, 16):
        failing = [moment] if how == "fail" else []
        stepper = FakeStepper(num_blocks=11, max_tokens=6, max_requests=4, asynchronous=asynchronous, failing=failing)
        engine = Engine(stepper)
        prompts = [[at, *range(20, 28)] for at in range(4)]
        groups = [engine.submit(prompt, SamplingParams(temperature=0, max_tokens=12)) for prompt in prompts]
        found: dict[tuple[int, int], Gathered] = {}
        for step in range(300):
            if how == "abort" and step == moment:
                gather(engine.abort(groups[1]), found)
                gather(engine.abort(groups[1]), found)
            gather(engine.step(), found)
            engine.scheduler.check()
            if not engine.unfinished:
                break
        given_back(engine)
        for group, prompt in zip(groups, prompts, strict=True):
            seen = found[group, 0]
            expected = alone(stepper.logits, prompt, GREEDY, 12)[0]
            assert len(seen.ends) == 1 and seen.tokens == expected[: len(seen.tokens)]
            assert len(seen.tokens) == 12 or seen.ends[0].finish_reason in ("abort", "error")
        again = [engine.submit(prompt, SamplingParams(temperature=0, max_tokens=3)) for prompt in prompts]
        found = run_all(engine)
        for group, prompt in zip(again, prompts, strict=True):
            assert found[group, 0].tokens == alone(stepper.logits, prompt, GREEDY, 3)[0], "a failed step is remembered"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_tokens_of_another_request(asynchronous: bool) -> None:
    """A block that is used again still has readers, or its old content is read: texts of others show up.

    Each request may only say tokens of its own; blocks change hands at every end.
    """

    def logits(tokens: Sequence[int]) -> NDArray[np.float64]:
        """The next token is one of those read, hence of the request's own alphabet."""
        row = np.full(VOCAB, -1e9)
        row[list(tokens)] = np.arange(len(tokens)) % 7
        return row

    engine = Engine(FakeStepper(num_blocks=13, logits=logits, asynchronous=asynchronous))
    owned = {}
    for at in range(30):
        alphabet = [4 * (at % 16) + letter for letter in range(4)]
        prompt = [alphabet[(at + i * i) % 4] for i in range(3 + at % 9)]
        owned[engine.submit(prompt, SamplingParams(seed=at, max_tokens=5 + at % 13))] = set(prompt)
    found = run_all(engine)
    given_back(engine)
    for group, own in owned.items():
        assert set(found[group, 0].tokens) <= own and found[group, 0].tokens


def test_a_stop_string_cut_anywhere_and_its_beginning_in_the_stream() -> None:
    """A stop string that several tokens make up is missed, or its first half was streamed already."""
    text, stop = "say <|stop|> more", "<|stop|>"
    for lead in range(4):
        spoken = ("x" * lead + text).encode()
        engine = Engine(FakeStepper(vocab_size=256, logits=spoken_logits(spoken)), ByteTokenizer())
        group = engine.submit([0], SamplingParams(temperature=0, max_tokens=40, stop=stop))
        pieces: list[Delta] = []
        while engine.unfinished:
            pieces += engine.step()
        assert "".join(delta.text for delta in pieces) == "x" * lead + "say "
        assert not any("<" in delta.text for delta in pieces)
        assert (pieces[-1].group, pieces[-1].finish_reason, pieces[-1].stop_reason) == (group, "stop", stop)


@pytest.mark.parametrize("text", ["größer", "日本語", "👩‍🚀 x", " leading  and trailing  "])
def test_characters_cut_by_tokens(text: str) -> None:
    """Bytes of a character come in several tokens, and the stream has replacement signs or lost blanks."""
    raw = text.encode()
    engine = Engine(FakeStepper(vocab_size=256, logits=spoken_logits(raw)), ByteTokenizer())
    engine.submit([0], SamplingParams(temperature=0, max_tokens=len(raw)))
    pieces: list[str] = []
    while engine.unfinished:
        pieces += [delta.text for delta in engine.step()]
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)


def test_log_probabilities_that_json_has_not() -> None:
    """Minus infinity and NaN make bodies that strict readers refuse."""

    def logits(tokens: Sequence[int]) -> NDArray[np.float64]:
        row = np.full(256, -np.inf)
        row[65 + len(tokens) % 3] = 0.0
        return row

    engine = Engine(FakeStepper(vocab_size=256, logits=logits), ByteTokenizer())
    engine.submit([1, 2], SamplingParams(temperature=0, max_tokens=4, logprobs=5, prompt_logprobs=2))
    deltas: list[Delta] = []
    while engine.unfinished:
        deltas += engine.step()
    legacy, chats = Completions(ByteTokenizer(), [[1, 2]], SamplingParams(logprobs=5), True), Chats(ByteTokenizer())

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is in the body")

    for delta in deltas:
        scores = (*delta.prompt_scores, *delta.scores)
        for body in (legacy.lists(0, (legacy.first(1), *scores)), chats.content(scores)):
            assert body is not None
            json.loads(event(body)[6:], parse_constant=refuse)
    assert sum(len(delta.scores) for delta in deltas) == 4 and sum(len(d.prompt_scores) for d in deltas) == 1


def test_offsets_of_a_prompt_that_its_tokenizer_changes(tmp_path: Path) -> None:
    """Where tokens begin is counted in other characters than those of the text, or without the blanks before words."""
    library = Library(models.WordLevel({"<s>": 0, "▁": 1, "▁two": 2, "▁words": 3, "?": 4}, unk_token="?"))
    library.normalizer = normalizers.Lowercase()
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    library.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    library.add_special_tokens(["<s>"])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = FileTokenizer(tmp_path)
    assert tokenizer.prefix == (0,) and tokenizer.encode("Two WORDS").tolist() == [2, 3]
    assert Echo.of(tokenizer, "Two WORDS") == Echo("Two WORDS", [0, 0, 3])
    assert Echo.of(tokenizer, [0, 2, 3]) == Echo("<s> two words", [0, 3, 7])
    library = Library(models.BPE({"a": 0, "Ġ": 1, "Ġa": 2}, [("Ġ", "a")]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.post_processor = processors.ByteLevel(trim_offsets=True)
    library.save(str(tmp_path / "tokenizer.json"))
    assert Echo.of(FileTokenizer(tmp_path), "a a  a").starts == [0, 1, 3, 4]
    assert Echo.of(None, [5, 6]) == Echo("", [0, 0])


def test_a_seed_whose_text_depends_on_others() -> None:
    """Random numbers that requests share: the same seed gives another text in another batch, or each time the same."""
    asked = SamplingParams(seed=42, max_tokens=10)
    stepper = FakeStepper(num_blocks=60, max_requests=4)
    expected = alone(stepper.logits, [1, 2], asked, 10, seed=42)[0]
    engine = Engine(stepper)
    for others in range(4):
        for at in range(others):
            engine.submit([3 + at] * (1 + 5 * at), SamplingParams(max_tokens=3 + at))
        group = engine.submit([1, 2], asked)
        assert run_all(engine)[group, 0].tokens == expected
    fresh = [engine.submit([1, 2], SamplingParams(max_tokens=10)) for _ in range(4)]
    found = run_all(engine)
    assert len({tuple(found[group, 0].tokens) for group in fresh}) == 4, "requests without a seed differ"


def test_bad_requests_among_good_ones() -> None:
    """What is wrong with one request ends the engine, or leaves others, or itself, waiting for ever."""
    engine = Engine(FakeStepper(num_blocks=20))
    good = engine.submit([1, 2], GREEDY)
    for prompt, params in [
        ([], GREEDY),
        ([VOCAB], GREEDY),
        ([1] * 64, GREEDY),
        ([1], SamplingParams(max_tokens=10**6)),
        ([1], SamplingParams(allowed_token_ids=[10**9])),
    ]:
        with pytest.raises(RequestError):
            engine.submit(prompt, params)
        engine.step()
    stepper = engine.stepper
    assert isinstance(stepper, FakeStepper)
    found = run_all(engine)
    given_back(engine)
    assert found.get((good, 0), Gathered()).tokens == alone(stepper.logits, [1, 2], GREEDY, 8)[0][5:]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_oldest_is_never_stopped(asynchronous: bool) -> None:
    """Who was stopped last goes on first, and with a stream of new requests the first one never ends.

    While the oldest runs it is not preempted, and ends within the steps that it takes alone and one more.
    """
    engine = Engine(FakeStepper(num_blocks=13, max_requests=4, asynchronous=asynchronous))
    first = engine.submit([1] * 8, SamplingParams(temperature=0, max_tokens=30))
    request = engine._groups[first][0].request
    for at in range(40):
        if not engine.has(first):
            break
        engine.submit([at] * 9, SamplingParams(temperature=0, max_tokens=30))
        engine.step()
    assert not engine.has(first) and request.preempted == 0 and engine.steps <= 34
    assert engine.scheduler.counts.preemptions > 0
