"""The engine in a thread: many streams of one loop, requests that are left, queues, and what happens at the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence

import pytest

from mgraph.runtime.serving.background import BackgroundEngine, Overloaded
from mgraph.runtime.serving.engine import Delta, Engine, EngineDead
from mgraph.runtime.serving.exchange import Exchange
from mgraph.runtime.serving.parameters import RequestError, SamplingParams
from tests.runtime.serving.fake_stepper import FakeStepper, alone

LONG = SamplingParams(temperature=0, max_tokens=60)


@pytest.fixture
def served() -> Iterator[BackgroundEngine]:
    background = BackgroundEngine(Engine(FakeStepper(num_blocks=400, max_requests=16)), max_queue=300)
    background.start()
    yield background
    background.stop()
    pool = background.engine.scheduler.pool
    assert background.active == 0 and pool.available == pool.usable and not background._driver._requests


async def begun(background: BackgroundEngine, prompt: list[int], params: SamplingParams = LONG) -> Exchange:
    exchange = Exchange(background)
    await exchange.submit(prompt, params)
    return exchange


async def read(exchange: Exchange) -> list[Delta]:
    """The last of them is not given out where it says that the request did not end by itself."""
    try:
        return [delta async for _, delta in exchange.deltas()]
    finally:
        exchange.close()


def test_many_streams(served: BackgroundEngine) -> None:
    async def main() -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=5)
        exchanges = [await begun(served, [at % 64, at // 64], params) for at in range(256)]
        deltas = await asyncio.gather(*map(read, exchanges))
        return [[token for delta in of_one for token in delta.tokens] for of_one in deltas]

    found = asyncio.run(main())
    stepper = served.engine.stepper
    assert isinstance(stepper, FakeStepper)
    greedy = SamplingParams(temperature=0)
    assert found == [alone(stepper.logits, [at % 64, at // 64], greedy, 5)[0] for at in range(256)]


def test_leaving_a_stream_ends_its_request(served: BackgroundEngine) -> None:
    async def main() -> None:
        exchange = await begun(served, [1, 2, 3])
        async for _ in exchange.deltas():
            break
        exchange.close()
        waiting = asyncio.create_task(read(await begun(served, [1])))
        await asyncio.sleep(0)
        waiting.cancel()
        for _ in range(200):
            if served.active == 0:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("it goes on though nobody listens")

    asyncio.run(main())


def test_errors_come_to_the_one_who_asked(served: BackgroundEngine) -> None:
    async def main() -> None:
        with pytest.raises(RequestError, match="empty"):
            await begun(served, [])
        with pytest.raises(RequestError, match="tokenizer"):
            await begun(served, [1], SamplingParams(bad_words=["x"]))
        with pytest.raises(Overloaded, match="at most 300"):
            for _ in range(10):
                await begun(served, [1], SamplingParams(n=128, max_tokens=20))

    asyncio.run(main())


def test_stopping_ends_what_is_under_way() -> None:
    background = BackgroundEngine(Engine(FakeStepper(seconds=0.01)))
    background.start()

    async def main() -> str | None:
        exchange = await begun(background, [1])
        await asyncio.to_thread(background.stop)
        await read(exchange)
        return exchange.output(0).outputs[0].finish_reason

    assert asyncio.run(main()) == "abort"
    assert background.active == 0


def test_a_mistake_of_the_engine_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    background = BackgroundEngine(Engine(FakeStepper()))

    def broken() -> list[Delta]:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(background.engine, "step", broken)
    background.start()

    async def main() -> str | None:
        exchange = await begun(background, [1])
        await read(exchange)
        with pytest.raises(EngineDead, match="ours"):
            await begun(background, [1])
        return exchange.failure

    assert asyncio.run(main()) == "ZeroDivisionError: ours"
    background.stop()


def test_all_are_told_where_the_engine_hangs() -> None:
    """Those under way, and those that come then."""
    background = BackgroundEngine(Engine(FakeStepper()))
    stepping, go_on = threading.Event(), threading.Event()

    def hanging() -> list[Delta]:
        stepping.set()
        assert go_on.wait(30)
        return []

    background.engine.step = hanging  # type: ignore[method-assign]
    background.start()

    async def main() -> str | None:
        exchange = await begun(background, [1], SamplingParams(n=2))
        await asyncio.to_thread(stepping.wait, 30)
        queued = asyncio.create_task(begun(background, [1]))
        await asyncio.sleep(0.05)
        background.fail("a rank died")
        with pytest.raises(EngineDead, match="a rank died"):
            await queued
        await read(exchange)
        with pytest.raises(EngineDead, match="a rank died"):
            await begun(background, [1])
        return exchange.failure

    assert asyncio.run(main()) == "a rank died"
    go_on.set()
    background.stop()
    assert background.active == 0 and not background.engine.unfinished


def test_a_request_that_fails_while_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    background = BackgroundEngine(Engine(FakeStepper()))
    submit = background.engine.submit

    def slow(prompt: Sequence[int], params: SamplingParams) -> int:
        group = submit(prompt, params)
        background.fail("a rank died")
        return group

    monkeypatch.setattr(background.engine, "submit", slow)
    background.start()

    async def main() -> None:
        for _ in range(2):
            with pytest.raises(EngineDead, match="a rank died"):
                await begun(background, [1])

    asyncio.run(main())
    background.stop()
    assert background.active == 0 and not background.engine.unfinished


@pytest.mark.parametrize("moment", ["before", "after", "refused"])
def test_all_end_while_one_is_taken(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the engine has it, after that, or where the engine refuses it: it is told, and others come after it."""
    background = BackgroundEngine(Engine(FakeStepper()))
    submit = background.engine.submit

    def ending(prompt: Sequence[int], params: SamplingParams) -> int:
        if moment == "after":
            group = submit(prompt, params)
        background.end_all("the server stops")
        if moment == "refused":
            raise RequestError("refused")
        return group if moment == "after" else submit(prompt, params)

    background.start()

    async def main() -> int:
        monkeypatch.setattr(background.engine, "submit", ending)
        with pytest.raises(EngineDead, match="the server stops"):
            await begun(background, [1])
        monkeypatch.undo()
        return len(await read(await begun(background, [1], SamplingParams(max_tokens=3))))

    assert asyncio.run(main()) == 3
    background.stop()
    assert background.active == 0 and background.engine.failure is None and not background._driver._requests


def test_those_that_wait_to_be_taken_are_told_at_the_end_too() -> None:
    background = BackgroundEngine(Engine(FakeStepper(seconds=1)))
    background.start()

    async def main() -> None:
        exchange = await begun(background, [1])
        await asyncio.sleep(0.2)
        waiting = asyncio.create_task(begun(background, [2]))
        await asyncio.sleep(0.2)
        background.end_all("the server stops")
        with pytest.raises(EngineDead, match="the server stops"):
            await asyncio.wait_for(waiting, 0.3)
        await read(exchange)
        assert exchange.failure == "the server stops"

    asyncio.run(main())
    background.stop()
    assert background.active == 0 and background.engine.failure is None


def test_each_continuation_ends_once() -> None:
    """Also where it is told in the middle of a step that goes on."""
    background = BackgroundEngine(Engine(FakeStepper(seconds=0.002)))
    background.start()

    async def main() -> list[tuple[int, str | None]]:
        arrived: asyncio.Queue[Delta] = asyncio.Queue()
        await background.submit([1], SamplingParams(n=3, max_tokens=30, temperature=1.0), arrived)
        await arrived.get()
        background.end_all("the server stops")
        await asyncio.to_thread(background.stop)
        await asyncio.sleep(0)
        deltas = [arrived.get_nowait() for _ in range(arrived.qsize())]
        return sorted((delta.index, delta.error) for delta in deltas if delta.finish_reason is not None)

    assert asyncio.run(main()) == [(index, "the server stops") for index in range(3)]
    assert background.active == 0


def test_a_loop_that_is_closed_keeps_nobody_else_waiting() -> None:
    background = BackgroundEngine(Engine(FakeStepper(seconds=0.005)))
    background.start()

    async def leaving() -> None:
        await begun(background, [1])  # and nobody closes it

    async def reading() -> int:
        found = sum(len(delta.tokens) for delta in await read(await begun(background, [2])))
        assert background.engine.generated < 90, "the one that nobody reads was ended"
        return found

    asyncio.run(leaving())
    assert asyncio.run(reading()) == 60
    background.stop()
    assert background.active == 0 and background.engine.failure is None


def test_what_a_step_gave_arrives_though_it_cannot_be_watched() -> None:
    def watch(deltas: Sequence[Delta]) -> None:
        raise ZeroDivisionError("a metric")

    background = BackgroundEngine(Engine(FakeStepper()), watch=watch)
    background.start()

    async def main() -> list[Delta]:
        deltas = await read(await begun(background, [1], SamplingParams(max_tokens=1)))
        for _ in range(200):
            if background.engine.failure is not None:
                break
            await asyncio.sleep(0.01)
        with pytest.raises(EngineDead, match="a metric"):
            await begun(background, [1])
        return deltas

    (last,) = asyncio.run(main())
    assert (last.finish_reason, len(last.tokens)) == ("length", 1)
    background.stop()
