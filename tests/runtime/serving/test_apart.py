"""Work apart from an event loop: results, errors, turns, and an end that waits for none of it."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from mgraph.runtime.serving.apart import Apart

TIME = 20.0
"""Seconds within which all ends that ends at all."""


def test_results_and_errors() -> None:
    def fail() -> None:
        raise ValueError("said")

    async def main() -> None:
        apart = Apart(1)
        assert await apart(threading.get_ident) != threading.get_ident()
        with pytest.raises(ValueError, match="said"):
            await apart(fail)
        assert await apart(lambda: 7) == 7, "one that failed has left its place"

    asyncio.run(asyncio.wait_for(main(), TIME))


def test_a_generator_that_has_ended_is_an_error_too() -> None:
    """The one exception that a future does not take."""

    async def main() -> None:
        with pytest.raises(RuntimeError, match="StopIteration"):
            await Apart(1)(lambda: next(iter([])))

    asyncio.run(asyncio.wait_for(main(), TIME))


def test_without_a_thread_the_place_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def main() -> None:
        apart = Apart(1)
        with monkeypatch.context() as changed:
            changed.setattr(threading.Thread, "start", none)
            with pytest.raises(RuntimeError, match="new thread"):
                await apart(lambda: 7)
        assert await apart(lambda: 7) == 7

    asyncio.run(asyncio.wait_for(main(), TIME))


def test_so_many_at_a_time() -> None:
    """Also after some that nobody waits for any more: these have their places until they end."""
    lock, now, most = threading.Lock(), 0, 0
    go = threading.Event()

    def work() -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        go.wait(TIME)
        with lock:
            now -= 1

    async def main() -> None:
        apart = Apart(2)
        tasks = [asyncio.ensure_future(apart(work)) for _ in range(6)]
        while now < 2:
            await asyncio.sleep(0.01)
        tasks[0].cancel()
        await asyncio.sleep(0.05)
        assert now == 2
        go.set()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(ended[0], asyncio.CancelledError) and ended[1:] == [None] * 5
        while now:  # nobody has waited for the first
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), TIME))
    assert most == 2


def test_the_end_waits_for_none() -> None:
    go = threading.Event()

    async def main() -> None:
        task = asyncio.ensure_future(Apart(1)(lambda: go.wait(3 * TIME)))
        await asyncio.sleep(0.05)
        task.cancel()

    begun = time.monotonic()
    asyncio.run(main())
    go.set()  # its end finds the loop closed
    assert time.monotonic() - begun < TIME
