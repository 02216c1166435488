"""Work apart from an event loop, in threads that keep no process from ending, as those of `asyncio.to_thread` do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

T = TypeVar("T")


class Apart:
    """Threads beside an event loop, at most so many at a time; what comes beyond waits for its turn."""

    def __init__(self, most: int) -> None:
        self._room = asyncio.Semaphore(most)

    async def __call__(self, work: Callable[[], T]) -> T:
        """The result of work, or what it raised. Cancelled, it waits no longer, and nor does the loop at its end."""
        await self._room.acquire()
        loop = asyncio.get_running_loop()
        made: asyncio.Future[T] = loop.create_future()

        def end(tell: Callable[[], None]) -> None:
            self._room.release()
            if not made.done():  # else nobody waits any more
                tell()

        def run() -> None:
            try:
                tell = partial(made.set_result, work())
            except StopIteration as error:  # a future does not take it
                tell = partial(made.set_exception, RuntimeError(f"the work raised {error!r}"))
            except BaseException as error:
                tell = partial(made.set_exception, error)
            with suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(end, tell)

        try:
            threading.Thread(target=run, name="apart", daemon=True).start()
        except RuntimeError:  # the system has no more
            self._room.release()
            raise
        return await made
