"""`LLM` on a stepper without a model: orders, errors, streams in turn, threads, a running event loop."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from mgraph.errors import OptionError
from mgraph.runtime.chat import ChatTemplate
from mgraph.runtime.serving.driver import Driver
from mgraph.runtime.serving.engine import Engine, EngineDead
from mgraph.runtime.serving.llm import LLM
from mgraph.runtime.serving.parameters import RequestError, SamplingParams
from mgraph.runtime.serving.request import Request
from mgraph.runtime.tokenizer import ByteTokenizer
from tests.runtime.serving.fake_stepper import FakeStepper, alone

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
GREEDY = SamplingParams(temperature=0, max_tokens=8)


WRONG_PROMPTS: list[tuple[Any, str]] = [
    ("", "empty"),
    ([256], "token 256"),
    ([1, "a"], "|".join(("has 'a', which is no integer", "must be a text or a list of token ids, not 1"))),
    (["a", True], "|".join(("has 'a', which is no integer", "must be a text or a list of token ids, not True"))),
    (5, "must be a text"),
    (None, "must be a text"),
    (b"bytes", "must be a text"),
    (torch.tensor(5), "must be a text"),
    (torch.tensor([1.5]), "has 1.5, which is no integer|must be a text or a list of token ids, not 1.5"),
    ({"a": 1}, "must be a text"),
    ({1}, "must be a text"),
    ("ab\ud800", "half of a surrogate pair, '.ud800', as character 2"),
]


@pytest.fixture
def llm() -> LLM:
    stepper = FakeStepper(vocab_size=256, num_blocks=40, max_length=128)
    return LLM.over(Engine(stepper, ByteTokenizer()), ChatTemplate(TEMPLATE, {}, "the test"))


def expected(llm: LLM, prompt: bytes, count: int = 8) -> tuple[int, ...]:
    stepper = llm.engine.stepper
    assert isinstance(stepper, FakeStepper)
    return tuple(alone(stepper.logits, list(prompt), GREEDY, count)[0])


def nothing_left(llm: LLM) -> None:
    pool = llm.engine.scheduler.pool
    llm._driver.ask(lambda: None)  # what was dropped before is ended now
    assert not llm.engine.unfinished and pool.available == pool.usable and not llm._driver._requests


def test_results_are_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts: list[str | list[int]] = ["one", [116, 119, 111], "three"]
    outputs = llm.generate(prompts, GREEDY)
    assert [o.outputs[0].token_ids for o in outputs] == [expected(llm, p) for p in (b"one", b"two", b"three")]
    assert [o.prompt for o in outputs] == ["one", None, "three"]
    assert outputs[1].prompt_token_ids == (116, 119, 111)
    assert all(o.finished and o.outputs[0].finish_reason == "length" for o in outputs)
    one_row: Any = torch.tensor([116, 119, 111])
    rows: Any = np.array([[111, 110, 101], [116, 119, 111]])
    for again in ([116, 119, 111], one_row, one_row.numpy(), rows[1:], list(rows[1:])):
        assert llm.generate(again, GREEDY)[0].outputs[0].token_ids == expected(llm, b"two")
    assert [o.outputs[0].token_ids for o in llm.generate(rows, GREEDY)] == [expected(llm, p) for p in (b"one", b"two")]
    nothing_left(llm)


def test_parameters_for_each(llm: LLM) -> None:
    outputs = llm.generate(["a", "b"], [{"max_tokens": 2, "n": 3, "logprobs": 1, "prompt_logprobs": 0}, GREEDY])
    assert [len(o.outputs) for o in outputs] == [3, 1]
    first = outputs[0].outputs[2]
    assert first.logprobs is not None and len(first.logprobs) == len(first.token_ids) == 2
    assert first.cumulative_logprob == pytest.approx(sum(s.logprob for s in first.logprobs))
    assert outputs[0].prompt_logprobs == (None,) and outputs[1].prompt_logprobs is None
    for wrong in ([GREEDY], [], {"max_token": 1}):
        with pytest.raises(RequestError):
            llm.generate(["a", "b"], wrong)
    nothing_left(llm)


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("failing", [False, True])
def test_continuations_that_end_in_one_step(n: int, failing: bool, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = {"n": n, "max_tokens": 3, "ignore_eos": True}
    if failing:

        def broken(*_: Any) -> Any:
            raise RuntimeError("no step")

        monkeypatch.setattr(llm.engine.stepper, "run", broken)
    reason = "error" if failing else "length"
    for output in llm.generate(["one"] if failing else ["one", "two"], params):
        assert [one.finish_reason for one in output.outputs] == [reason] * n
    if not failing:  # an engine whose steps fail again and again takes no more
        ended = [delta.index for delta in llm.stream("two", params) if delta.finish_reason == reason]
        assert sorted(ended) == list(range(n))
    nothing_left(llm)


def test_a_prompt_may_only_be_scored(llm: LLM) -> None:
    """Nothing is generated then, and nothing counted; the scores are those that a longer request gives."""
    asked = {"prompt_logprobs": 1, "temperature": 0}
    scored, longer = llm.generate(["some text"] * 2, [{**asked, "max_tokens": 0}, {**asked, "max_tokens": 1}])
    assert scored.prompt_logprobs == longer.prompt_logprobs and len(scored.prompt_logprobs or ()) == 9
    (only,) = scored.outputs
    assert (only.text, only.token_ids, only.finish_reason) == ("", (), "length")
    assert llm.engine.generated == 1
    nothing_left(llm)


@pytest.mark.parametrize(("prompts", "message"), WRONG_PROMPTS)
def test_a_wrong_prompt_begins_nothing(llm: LLM, prompts: Any, message: str) -> None:
    for ask in (llm.generate, llm.stream):
        with pytest.raises(RequestError, match=message):
            ask(prompts, GREEDY)
        nothing_left(llm)


@pytest.mark.parametrize("several", [["a", ""], ["a", [256]], ["a", 5], [{1}], [None], {1: "a"}])
def test_a_wrong_one_among_prompts_begins_nothing(llm: LLM, several: Any) -> None:
    with pytest.raises(RequestError):
        llm.generate(several, GREEDY)
    nothing_left(llm)


@pytest.mark.parametrize("params", ["b", 5, ["b"], [5], [[GREEDY]]])
def test_parameters_that_are_none(llm: LLM, params: Any) -> None:
    with pytest.raises(RequestError, match="must be SamplingParams or a dict of its fields"):
        llm.generate("a", params)
    nothing_left(llm)


def test_streams_read_in_turn(llm: LLM) -> None:
    streams = [llm.stream(text, GREEDY) for text in ("one", "two")]
    tokens: list[list[int]] = [[], []]
    for _ in range(8):
        for at, stream in enumerate(streams):
            tokens[at] += next(stream).tokens
    assert [tuple(t) for t in tokens] == [expected(llm, b"one"), expected(llm, b"two")]
    assert [next(stream, None) for stream in streams] == [None, None]
    left = llm.stream("three", GREEDY)
    next(left)
    left.close()  # type: ignore[attr-defined]  # it is a generator
    nothing_left(llm)


def test_a_stream_that_nobody_reads_begins_nothing() -> None:
    llm = LLM.over(Engine(FakeStepper(vocab_size=256, num_blocks=40, max_length=128, seconds=0.01), ByteTokenizer()))
    for begun in (False, True):
        dropped = llm.stream("one", {"temperature": 0, "max_tokens": 100})
        if begun:
            assert next(dropped).tokens == expected(llm, b"one")[:1] and llm.engine.unfinished
        del dropped
        nothing_left(llm)
    assert llm.engine.steps < 50
    with pytest.raises(RequestError, match="token 256"):
        llm.stream([256], GREEDY)
    nothing_left(llm)


@pytest.mark.parametrize("moment", ["run", "end"])
def test_a_stream_that_is_collected_during_a_step_is_ended_after_it(
    llm: LLM, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = llm.stream("one", {"max_tokens": 50})
    next(stream)
    cycle: list[Any] = [stream]
    cycle.append(cycle)
    del stream, cycle
    owner: Any = llm.engine.stepper if moment == "run" else llm.engine.scheduler
    inner = getattr(owner, moment)

    def collecting(*arguments: Any) -> Any:
        monkeypatch.undo()  # once: it takes long where there is much
        gc.collect()
        return inner(*arguments)

    monkeypatch.setattr(owner, moment, collecting)
    tokens: list[tuple[int, ...]] = []
    thread = threading.Thread(
        target=lambda: tokens.append(llm.generate("two", GREEDY)[0].outputs[0].token_ids), daemon=True
    )
    thread.start()
    thread.join(60)  # one that waits for itself would wait for ever
    assert tokens == [expected(llm, b"two")]
    nothing_left(llm)


def test_threads_share_the_steps(llm: LLM) -> None:
    with ThreadPoolExecutor(8) as threads:
        texts = [f"prompt {at}" for at in range(16)]
        outputs = list(threads.map(lambda text: llm.generate(text, GREEDY)[0].outputs[0].token_ids, texts))
    assert outputs == [expected(llm, text.encode()) for text in texts]
    nothing_left(llm)


@pytest.mark.parametrize("of_main", [False, True])
def test_a_thread_that_makes_steps_lets_others_in(of_main: bool) -> None:
    """A request of another thread begins within a few steps of a long one, and does not wait for its end."""
    stepper = FakeStepper(vocab_size=256, num_blocks=300, max_length=2048, block_size=8)
    llm = LLM.over(Engine(stepper, ByteTokenizer()))
    waited: list[int] = []

    def ask() -> None:
        end = time.monotonic() + 30
        while llm.engine.steps < 20 and time.monotonic() < end:
            time.sleep(1e-4)
        for _ in range(5):
            before = llm.engine.steps
            llm.generate([[3, 4]], {"temperature": 0, "max_tokens": 2})
            waited.append(llm.engine.steps - before)

    def go_on() -> None:
        llm.generate([[1, 2]], {"temperature": 0, "max_tokens": 1500, "ignore_eos": True})

    others = [threading.Thread(target=one) for one in ([ask] if of_main else [ask, go_on])]
    for other in others:
        other.start()
    if of_main:
        go_on()
    for other in others:
        other.join()
    # Before it asks a thread may be kept from running, which is nobody's fault.
    assert len(waited) == 5 and sorted(waited)[2] <= 10, waited
    nothing_left(llm)


def test_inside_a_running_event_loop(llm: LLM) -> None:
    async def inside() -> tuple[int, ...]:
        return llm.generate("one", GREEDY)[0].outputs[0].token_ids

    assert asyncio.run(inside()) == expected(llm, b"one")


def test_chat(llm: LLM) -> None:
    output = llm.chat([{"role": "user", "content": "hi"}], GREEDY)[0]
    assert output.outputs[0].token_ids == expected(llm, b"user: hi\nassistant: ")
    assert output.prompt == "user: hi\nassistant: "
    with pytest.raises(RequestError, match="maximum context length") as caught:
        llm.chat([{"role": "user", "content": "x" * 200}])
    assert caught.value.param == "messages"
    with pytest.raises(RequestError, match="half of a surrogate pair") as caught:
        llm.chat([{"role": "user", "content": "\udfff"}])
    assert caught.value.param == "messages"
    without = LLM.over(Engine(llm.engine.stepper, ByteTokenizer()))
    with pytest.raises(RequestError, match=r"no chat template(.|\n)*--chat-template FILE \(chat_template in Python\)"):
        without.chat([{"role": "user", "content": "hi"}])


def test_more_variables_of_the_template(llm: LLM) -> None:
    source = "{{ messages[0].content }}{% if thinking %} (think {{ depth }}){% endif %}{{ eos_token }}:"
    template = ChatTemplate(source, {"eos_token": "."}, "the test")
    asking = LLM.over(Engine(llm.engine.stepper, ByteTokenizer()), template)
    message = [{"role": "user", "content": "hi"}]
    for given, expected_prompt in ((None, "hi.:"), ({"thinking": True, "depth": 3, "more": 1}, "hi (think 3).:")):
        assert asking.chat(message, GREEDY, chat_template_kwargs=given)[0].prompt == expected_prompt
    wrong: list[tuple[Any, str]] = [(5, "must map names"), ({1: 2}, "must map names")]
    wrong += [({name: 1}, f"has '{name}'") for name in ("messages", "tools", "add_generation_prompt", "eos_token")]
    for given, said in wrong:
        with pytest.raises(RequestError, match=said) as caught:
            asking.chat(message, GREEDY, chat_template_kwargs=given)
        assert caught.value.param == "chat_template_kwargs"


def test_conversations_in_parts_and_of_tools(llm: LLM) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    of_parts: list[dict[str, Any]] = [{"role": "user", "content": parts}]
    of_tools: list[dict[str, Any]] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {"role": "tool", "content": "4"},
    ]
    first, second = llm.chat([of_parts, of_tools], GREEDY)
    assert first.outputs[0].token_ids == expected(llm, b"user: hi\nassistant: ")
    assert second.outputs[0].token_ids == expected(llm, b"user: x\nassistant: \ntool: 4\nassistant: ")
    assert of_parts[0]["content"] is parts, "what was given stays as it was"


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        ('{"city": "Paris"}', '{"city": "Paris"}'),
        ({"city": "Paris"}, '{"city": "Paris"}'),
        ("no JSON {", '"no JSON {"'),
        ("[1]", '"[1]"'),
    ],
)
def test_templates_see_arguments_of_tools_as_objects(arguments: Any, seen: str) -> None:
    """OpenAI's form has them as a text, transformers' templates write them as JSON."""
    stepper = FakeStepper(vocab_size=256, num_blocks=40, max_length=128)
    text = (
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    llm = LLM.over(Engine(stepper, ByteTokenizer()), ChatTemplate(text, {}, "the test"))
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    (output,) = llm.chat([{"role": "assistant", "content": None, "tool_calls": [call]}], GREEDY)
    assert output.prompt == seen and call["function"]["arguments"] == arguments  # type: ignore[index]


@pytest.mark.parametrize(("given", "param"), [({1: 2}, "params"), ({"stop_token_ids": [10**5000]}, "stop_token_ids")])
def test_wrong_parameters_are_told_however_wrong(llm: LLM, given: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate("a", given)
    assert caught.value.param == param and len(str(caught.value)) < 300
    with pytest.raises(RequestError, match="token a number of 16610 bits"):
        llm.generate([10**5000])


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (5, "messages"),
        (None, "messages"),
        ("hi", "messages"),
        ({"role": "user", "content": "hi"}, "messages"),
        ([{"content": "x"}], "messages.0.role"),
        ([{"role": "king", "content": "x"}], "messages.0.role"),
        ([{"role": "user", "content": "x"}, 5], "messages.1"),
        ([{"role": "user", "content": 3}], "messages.0.content"),
        ([{"role": "user"}], "messages.0.content"),
        ([{"role": "assistant", "content": None}], "messages.0.content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages.0.content"),
        ([{"role": "user", "content": ["x"]}], "messages.0.content"),
    ],
)
def test_what_is_no_conversation(llm: LLM, messages: Any, param: str) -> None:
    good = [{"role": "user", "content": "hi"}]
    for asked in (messages, [good, messages]):
        with pytest.raises(RequestError) as caught:
            llm.chat(asked, GREEDY)
        assert caught.value.param == param
        nothing_left(llm)


def test_no_messages_and_wrong_tools(llm: LLM) -> None:
    empty: list[Any] = [[], [[]]]
    for none in empty:
        with pytest.raises(RequestError, match="has no messages"):
            llm.chat(none)
    tools: Any = "find"
    with pytest.raises(RequestError, match="tools must be a list, not 'find'"):
        llm.chat([{"role": "user", "content": "hi"}], tools=tools)


def test_the_cache_can_be_forgotten(llm: LLM) -> None:
    cached = []
    for forget in (False, False, True):
        if forget:
            llm.reset_prefix_cache()
        cached.append(llm.generate("a prompt of some blocks", GREEDY)[0].cached_tokens)
    assert cached == [0, 20, 0]
    nothing_left(llm)


def test_public_names() -> None:
    import mgraph
    import mgraph.runtime

    assert mgraph.LLM is mgraph.runtime.LLM is LLM
    assert mgraph.SamplingParams is mgraph.runtime.SamplingParams is SamplingParams


MAIN = threading.main_thread().ident or 0


class OwnError(Exception):
    """What a caller's handler of a signal raises."""


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def own_handler(*_: object) -> None:
    raise OwnError


@pytest.fixture
def handlers() -> Iterator[None]:
    """Of signals; they are as they were afterwards."""
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, interrupt)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(("handler", "raised"), [(interrupt, KeyboardInterrupt), (own_handler, OwnError)])
def test_signals_in_the_middle_of_steps(
    llm: LLM, handler: Any, raised: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They end the call that waits. The steps go on to their end: nothing wrong is remembered, no request suffers."""
    prompt, other = b"a prompt of more than one block, which takes several steps of the engine", b"other"
    run, submit, left = llm.engine.stepper.run, llm.engine.submit, [0, 0]

    def interrupted(*given: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            signal.pthread_kill(MAIN, signal.SIGINT)
            time.sleep(0.02)  # so that the main thread has been told
        return run(*given)

    def begins(ids: Any, params: Any) -> int:
        left[0] = left[1] if len(ids) == len(prompt) else 0
        return submit(ids, params)

    monkeypatch.setattr(llm.engine.stepper, "run", interrupted)
    monkeypatch.setattr(llm.engine, "submit", begins)
    signal.signal(signal.SIGINT, handler)
    for steps in (1, 2, 4):
        left[1] = steps
        stream = llm.stream(other.decode(), {"temperature": 0, "max_tokens": 100})
        tokens = [token for _ in range(2) for token in next(stream).tokens]
        with pytest.raises(raised):
            llm.generate(prompt.decode(), GREEDY)
        left[1] = 0
        tokens += [token for delta in stream for token in delta.tokens]
        assert tuple(tokens) == expected(llm, other, 100)
        (output,) = llm.generate(prompt.decode(), GREEDY)
        assert output.outputs[0].token_ids == expected(llm, prompt) and output.outputs[0].finish_reason == "length"
        assert llm.engine.failure is None
        nothing_left(llm)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("moment", ["submit", "run"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_signal_does_not_wait(moment: str, stream: bool, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was begun goes on without the caller, who may not know yet which requests those are, and ends them."""
    owner: Any = llm.engine if moment == "submit" else llm.engine.stepper
    inner, go_on = getattr(owner, moment), threading.Event()

    def interrupted(*given: Any) -> Any:
        signal.pthread_kill(MAIN, signal.SIGINT)
        assert go_on.wait(10)
        return inner(*given)

    monkeypatch.setattr(owner, moment, interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(llm.stream("prompt", GREEDY)) if stream else llm.generate("prompt", GREEDY)
    monkeypatch.setattr(owner, moment, inner)
    go_on.set()
    (output,) = llm.generate("prompt", GREEDY)
    assert output.outputs[0].token_ids == expected(llm, b"prompt")
    nothing_left(llm)


def signals(every: float) -> None:
    """SIGALRM again and again, or (0) no more."""
    signal.setitimer(signal.ITIMER_REAL, every, every)


@pytest.fixture
def alarm() -> Iterator[None]:
    """The handler of SIGALRM is as it was afterwards."""
    before = signal.getsignal(signal.SIGALRM)
    yield
    signals(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("alarm")
def test_handlers_of_signals_may_call_it(llm: LLM) -> None:
    """Whatever the main thread does with it at that moment: nothing waits for itself, all results are right."""
    found: list[tuple[int, ...]] = []
    inside = [False]

    def asks(*_: object) -> None:
        if inside[0]:
            return
        inside[0] = True
        found.append(llm.generate("handler", GREEDY)[0].outputs[0].token_ids)
        stream = llm.stream("left", GREEDY)
        next(stream)
        del stream
        llm.reset_prefix_cache()
        inside[0] = False

    signal.signal(signal.SIGALRM, asks)
    signals(0.0017)
    end = time.monotonic() + 20
    while len(found) < 100 and time.monotonic() < end:
        assert llm.generate("main", GREEDY)[0].outputs[0].token_ids == expected(llm, b"main")
        tokens = [token for delta in llm.stream("stream", GREEDY) for token in delta.tokens]
        assert tuple(tokens) == expected(llm, b"stream")
    signals(0)
    assert len(found) >= 10 and set(found) == {expected(llm, b"handler")}
    nothing_left(llm)


@pytest.mark.usefixtures("alarm")
def test_handlers_of_signals_may_raise_at_any_moment(llm: LLM) -> None:
    other = llm.stream("other", {"temperature": 0, "max_tokens": 100})
    tokens = list(next(other).tokens)
    signal.signal(signal.SIGALRM, own_handler)
    raised, end = 0, time.monotonic() + 20
    while raised < 200 and time.monotonic() < end:
        try:
            signal.setitimer(signal.ITIMER_REAL, 1e-5 * (1 + raised % 150))
            for _ in range(10):
                llm.generate("main", GREEDY)
                list(llm.stream("stream", GREEDY))
                llm.reset_prefix_cache()
            signals(0)
        except OwnError:
            raised += 1
    assert raised >= 20
    tokens += [token for delta in other for token in delta.tokens]
    assert tuple(tokens) == expected(llm, b"other", 100)
    nothing_left(llm)


def at_instruction(number: int, happens: Callable[[], None]) -> Callable[..., Any]:
    """A tracer that lets something happen between two instructions of `llm.py`, `driver.py` or a context manager."""
    left = [number]

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.endswith(("llm.py", "driver.py", "contextlib.py")):
            return None
        frame.f_trace_opcodes = True
        left[0] -= event == "opcode"
        if left[0] == 0 and event == "opcode":
            left[0] = -1
            happens()
        return trace

    return trace


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("raising", [False, True])
def test_handlers_between_any_two_instructions(llm: LLM, raising: bool, stream: bool) -> None:
    def happens() -> None:
        sys.settrace(None)
        if raising:
            raise OwnError
        assert llm.generate("handler", GREEDY)[0].outputs[0].token_ids == expected(llm, b"handler")
        reached.append(True)

    def outer() -> tuple[int, ...]:
        if stream:
            return tuple(token for delta in llm.stream("main", GREEDY) for token in delta.tokens)
        return llm.generate("main", GREEDY)[0].outputs[0].token_ids

    number, reached = 0, [True]  # every third: one instruction is much like its neighbours
    while reached:
        number += 3
        reached.clear()
        found = expected(llm, b"main")
        sys.settrace(at_instruction(number, happens))
        try:
            found = outer()
        except OwnError:
            reached.append(True)
        finally:
            sys.settrace(None)
        assert found == expected(llm, b"main")
        nothing_left(llm)
    assert number > 200


def test_nobody_holds_it_any_more() -> None:
    """Its thread ends, whatever is under way, and the engine (a device's memory) is free at once."""
    stepper = FakeStepper(vocab_size=256, num_blocks=40, max_length=128, seconds=0.01)
    llm = LLM.over(Engine(stepper, ByteTokenizer()))
    next(llm.stream("one", GREEDY))
    held, thread = weakref.ref(llm.engine), llm._driver._thread
    assert thread.is_alive()
    del llm
    assert not thread.is_alive()
    gc.collect()
    assert held() is None


def test_an_engine_has_one_driver() -> None:
    """A second one ends nothing of the first, and may come after it."""
    engine = Engine(FakeStepper(vocab_size=256, num_blocks=40, max_length=128), ByteTokenizer())
    llm = LLM.over(engine)
    stream = llm.stream("main", GREEDY)
    tokens = list(next(stream).tokens)
    with pytest.raises(OptionError, match="another LLM or server has this engine"):
        LLM.over(engine)
    gc.collect()
    tokens += [token for delta in stream for token in delta.tokens]
    assert tuple(tokens) == expected(llm, b"main")
    del llm, stream
    gc.collect()
    after = LLM.over(engine)
    assert after.generate("after", GREEDY)[0].outputs[0].token_ids == expected(after, b"after")


def test_a_driver_that_never_began_can_be_stopped() -> None:
    engine = Engine(FakeStepper(), ByteTokenizer())
    driver = Driver(engine)
    driver.stop()
    with pytest.raises(EngineDead, match="was stopped"):
        driver.ask(lambda: driver.submit([1], SamplingParams(), print))
    with pytest.raises(EngineDead, match="nothing makes steps any more"):
        Driver(engine).ask(lambda: 1)
    Driver(engine).start()


def test_a_program_that_ends_amid_a_stream() -> None:
    program = (
        "from mgraph.runtime.serving.engine import Engine\n"
        "from mgraph.runtime.serving.llm import LLM\n"
        "from tests.runtime.serving.fake_stepper import FakeStepper\n"
        "llm = LLM.over(Engine(FakeStepper(seconds=0.01)))\n"
        "stream = llm.stream([1, 2], {'max_tokens': 60})\n"
        "print(len(next(stream).tokens))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_where_even_the_end_goes_wrong_nobody_waits(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise SystemExit("as no Exception is")

    monkeypatch.setattr(llm.engine, "step", broken)
    monkeypatch.setattr(llm.engine, "end_all", broken)
    ended = llm.generate("one", {"n": 2})[0].outputs
    assert [output.error for output in ended] == ["SystemExit: as no Exception is"] * 2
    llm._driver._thread.join(10)
    with pytest.raises(EngineDead, match="was stopped"):
        llm.generate("two", GREEDY)


@pytest.mark.parametrize("asked", ["generate", "stream", "reset"])
def test_what_is_collected_in_a_step_cannot_ask(llm: LLM, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for the thread that collects it."""
    told: list[EngineDead] = []

    def session() -> Iterator[int]:
        try:
            yield 1
        finally:
            try:
                if asked == "reset":
                    llm.reset_prefix_cache()
                else:
                    llm.generate("bye") if asked == "generate" else next(llm.stream("bye"))
            except EngineDead as error:
                told.append(error)

    cycle: list[Any] = [session()]
    next(cycle[0])
    cycle.append(cycle)
    del cycle
    run = llm.engine.stepper.run

    def collecting(*arguments: Any) -> Any:
        monkeypatch.undo()
        gc.collect()
        return run(*arguments)

    monkeypatch.setattr(llm.engine.stepper, "run", collecting)
    assert llm.generate("two", GREEDY)[0].outputs[0].token_ids == expected(llm, b"two")
    assert [error.message for error in told] == ["the thread that makes steps cannot wait for one"]
    nothing_left(llm)


@pytest.mark.parametrize("owner", ["engine", "scheduler"])
def test_a_mistake_of_ours_is_told_to_all(llm: LLM, owner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for ever."""

    def broken(*_: Any) -> Any:
        raise AssertionError("a mistake")

    of_engine = owner == "engine"
    monkeypatch.setattr(llm.engine if of_engine else llm.engine.scheduler, "step" if of_engine else "plan", broken)
    first, second = llm.generate(["one", "two"], GREEDY)
    assert {o.outputs[0].finish_reason for o in (first, second)} == {"error"}
    assert first.outputs[0].error == "AssertionError: a mistake"
    with pytest.raises(EngineDead, match="a mistake"):
        llm.generate("three", GREEDY)
    nothing_left(llm)


def test_one_that_cannot_be_ended_keeps_nobody_waiting(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    end = llm.engine.scheduler.end

    def broken(request: Request) -> None:
        if request.number == 1:
            raise AssertionError("a mistake")
        end(request)

    monkeypatch.setattr(llm.engine.scheduler, "end", broken)
    longer = {"temperature": 0, "max_tokens": 20}
    outputs = [output.outputs[0] for output in llm.generate(["one", "two", "three"], [GREEDY, GREEDY, longer])]
    assert [output.finish_reason for output in outputs] == ["length", "length", "error"]
    assert outputs[0].token_ids == expected(llm, b"one") and outputs[2].error == "AssertionError: a mistake"
    with pytest.raises(EngineDead, match="a mistake"):
        llm.generate("five", GREEDY)
    assert not llm.engine.unfinished and not llm._driver._requests


def test_what_was_under_way_at_a_reset_is_not_found_later(llm: LLM) -> None:
    prompt = "a little more than one block"
    stream = llm.stream(prompt, GREEDY)
    next(stream)
    llm.reset_prefix_cache()
    tokens = [token for delta in stream for token in delta.tokens]
    assert len(tokens) == 7
    (output,) = llm.generate(prompt * 2, GREEDY)
    assert output.cached_tokens == 0
    assert llm.generate(prompt * 2, GREEDY)[0].cached_tokens > 0
    nothing_left(llm)
