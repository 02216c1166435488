"""What makes the steps of an `LLM`: threads, signals at any moment, what is collected, ends and mistakes."""

from __future__ import annotations

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

import pytest

from mgraph.errors import OptionError
from mgraph.runtime.serving.driver import Driver
from mgraph.runtime.serving.engine import Delta, Engine, EngineDead
from mgraph.runtime.serving.llm import LLM
from mgraph.runtime.serving.parameters import SamplingParams
from mgraph.runtime.serving.request import Request
from mgraph.runtime.tokenizer import ByteTokenizer
from tests.runtime.serving.fake_llm import GREEDY, expected, fresh_llm, nothing_left
from tests.runtime.serving.fake_stepper import FakeStepper


@pytest.fixture
def llm() -> LLM:
    return fresh_llm()


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


def test_what_begins_while_all_are_told_is_told_too(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, tell = llm._driver, llm._driver._tell_all
    told: list[Delta] = []

    def telling(reason: str, error: str | None) -> None:
        tell(reason, error)
        driver.ask(lambda: driver.submit([1], SamplingParams(n=2, max_tokens=100), told.append))

    monkeypatch.setattr(driver, "_tell_all", telling)
    driver.end_all("error", "all end")
    nothing_left(llm)
    assert sorted((delta.index, delta.error) for delta in told if delta.finish_reason) == [
        (0, "all end"),
        (1, "all end"),
    ]


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
