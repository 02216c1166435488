"""The engine in a thread: many streams of one loop, requests that are left, queues, and what happens at the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from mgraph.runtime.serving.background import BackgroundEngine, Overloaded, Stream
from mgraph.runtime.serving.engine import Delta, Engine, EngineDead
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
    assert background.active == 0 and pool.available == pool.usable and not background._streams


async def read(stream: Stream) -> list[int]:
    async with stream:
        return [token async for delta in stream for token in delta.tokens]


def test_many_streams(served: BackgroundEngine) -> None:
    async def main() -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=5)
        streams = [await served.submit([at % 64, at // 64], params) for at in range(256)]
        return await asyncio.gather(*map(read, streams))

    found = asyncio.run(main())
    stepper = served.engine.stepper
    assert isinstance(stepper, FakeStepper)
    greedy = SamplingParams(temperature=0)
    assert found == [alone(stepper.logits, [at % 64, at // 64], greedy, 5)[0] for at in range(256)]


def test_leaving_a_stream_ends_its_request(served: BackgroundEngine) -> None:
    async def main() -> None:
        stream = await served.submit([1, 2, 3], LONG)
        async with stream:
            async for _ in stream:
                break
        waiting = asyncio.create_task(read(await served.submit([1], LONG)))
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
            await served.submit([], LONG)
        with pytest.raises(RequestError, match="tokenizer"):
            await served.submit([1], SamplingParams(bad_words=["x"]))
        with pytest.raises(Overloaded, match="at most 300"):
            for _ in range(10):
                await served.submit([1], SamplingParams(n=128, max_tokens=20))

    asyncio.run(main())


def test_stopping_ends_what_is_under_way() -> None:
    background = BackgroundEngine(Engine(FakeStepper(seconds=0.01)))
    background.start()

    async def main() -> list[Delta]:
        stream = await background.submit([1], LONG)
        await asyncio.to_thread(background.stop)
        return [delta async for delta in stream]

    assert asyncio.run(main())[-1].finish_reason == "abort"
    assert background.active == 0


def test_a_mistake_of_the_engine_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    background = BackgroundEngine(Engine(FakeStepper()))

    def broken() -> list[Delta]:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(background.engine, "step", broken)
    background.start()

    async def main() -> list[Delta]:
        deltas = [delta async for delta in await background.submit([1], LONG)]
        with pytest.raises(EngineDead, match="ours"):
            await background.submit([1], LONG)
        return deltas

    (last,) = asyncio.run(main())
    assert (last.finish_reason, last.error) == ("error", "ZeroDivisionError: ours")
    background.stop()


def test_all_are_told_where_the_engine_hangs() -> None:
    """Those under way, and those that come then."""
    background = BackgroundEngine(Engine(FakeStepper()))
    begun, go_on = threading.Event(), threading.Event()

    def hanging() -> list[Delta]:
        begun.set()
        assert go_on.wait(30)
        return []

    background.engine.step = hanging  # type: ignore[method-assign]
    background.start()

    async def main() -> list[Delta]:
        stream = await background.submit([1], LONG)
        await asyncio.to_thread(begun.wait, 30)
        queued = asyncio.create_task(background.submit([1], LONG))
        await asyncio.sleep(0.05)
        background.fail("a rank died")
        with pytest.raises(EngineDead, match="a rank died"):
            await queued
        deltas = [delta async for delta in stream]
        with pytest.raises(EngineDead, match="a rank died"):
            await background.submit([1], LONG)
        return deltas

    (last,) = asyncio.run(main())
    assert (last.finish_reason, last.error) == ("error", "a rank died")
    go_on.set()
    background.stop()
