"""A driven engine for programs with an event loop: the loop never waits for a step.

What comes of requests goes back in one call into the loop for each step, however many requests it has something for.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import Self

from mgraph.errors import MgraphError
from mgraph.runtime.serving.driver import Driver
from mgraph.runtime.serving.engine import Delta, Engine, EngineDead
from mgraph.runtime.serving.parameters import SamplingParams


class Overloaded(MgraphError):
    """More requests are under way than are allowed; this one may come again later."""


class Stream:
    """The deltas of one request, in an event loop. Leaving it before its end ends the request."""

    def __init__(self, owner: BackgroundEngine, count: int, arrived: asyncio.Queue[Delta] | None = None) -> None:
        self.group = -1
        self.arrived: asyncio.Queue[Delta] = asyncio.Queue() if arrived is None else arrived
        self.loop = asyncio.get_running_loop()
        self.left = count
        """Continuations that go on."""
        self._owner = owner

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the request, if it has not ended."""
        if self.left:
            self._owner.abort(self.group)
            self.left = 0

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while self.left:
            delta = await self.arrived.get()
            self.left -= delta.finish_reason is not None
            yield delta


class BackgroundEngine:
    """Serves requests from event loops. `start` it first, and `stop` it in the end."""

    def __init__(
        self, engine: Engine, max_queue: int = 0, watch: Callable[[Sequence[Delta]], None] | None = None
    ) -> None:
        """At most `max_queue` sequences may be under way (0: any number). `watch` sees the deltas of each step."""
        self.engine = engine
        self._max_queue = max_queue
        self._watch = watch or (lambda deltas: None)
        self._streams: dict[int, Stream] = {}
        self._asked: set[Future[int]] = set()
        """Of requests that the engine has not taken yet."""
        self._sequences = 0  # asked for and not ended; changed in the thread of the loop and of the engine, by the lock
        self._lock = threading.Lock()
        self._driver = Driver(engine, self._deliver)

    @property
    def active(self) -> int:
        """Sequences that are under way."""
        return self._sequences

    def start(self) -> None:
        """Begin to serve."""
        self._driver.start()

    def stop(self) -> None:
        """End all requests and the thread, which is left to itself where a step hangs."""
        self._driver.stop()

    async def submit(
        self, prompt: Sequence[int], params: SamplingParams, arrived: asyncio.Queue[Delta] | None = None
    ) -> Stream:
        """Begin a request, whose deltas go to `arrived`, if given. Raises RequestError, EngineDead, Overloaded."""
        self.engine.check(prompt, params)
        self.engine.check_alive()  # its thread may not tell any more
        with self._lock:
            if self._max_queue and self._sequences + params.n > self._max_queue:
                raise Overloaded(
                    f"{self._sequences} sequences are under way, and at most {self._max_queue} are allowed",
                    hint="try again later",
                )
            self._sequences += params.n
        stream, answer = Stream(self, params.n, arrived), Future[int]()
        self._asked.add(answer)
        answer.add_done_callback(self._asked.discard)
        self._driver.do(lambda: self._submit(prompt, params, stream, answer))
        try:
            stream.group = await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            answer.add_done_callback(self._abandon)
            raise
        return stream

    def abort(self, group: int) -> None:
        """End a request soon."""
        self._driver.do(lambda: self._deliver(self.engine.abort(group)))

    def end_all(self, why: str) -> None:
        """End all requests after the step that runs, with an error that says why."""
        self._driver.do(lambda: self._deliver(self.engine.end_all("error", why)))

    def fail(self, why: str) -> None:
        """Tell all requests that nothing more comes of them, and take no others; by any thread, as the engine's own may
        hang in a step."""
        self.engine.failure = RuntimeError(why)
        for answer in list(self._asked):
            if not answer.done():
                answer.set_exception(EngineDead(why))
        for group, stream in list(self._streams.items()):
            stream.loop.call_soon_threadsafe(_put, [(stream, Delta(group, 0, finish_reason="error", error=why))])

    def _submit(self, prompt: Sequence[int], params: SamplingParams, stream: Stream, answer: Future[int]) -> None:
        if answer.done() or not answer.set_running_or_notify_cancel():
            self._ended(params.n)
            return
        try:
            group = self._driver.submit(prompt, params)
        except Exception as error:
            self._ended(params.n)
            answer.set_exception(error)
            return
        self._streams[group] = stream
        answer.set_result(group)

    def _abandon(self, answer: Future[int]) -> None:
        """Whoever asked has gone, perhaps after the request began."""
        if not answer.cancelled() and answer.exception() is None:
            self.abort(answer.result())

    def _deliver(self, deltas: Sequence[Delta]) -> None:
        if not deltas:
            return
        self._watch(deltas)
        loops: dict[asyncio.AbstractEventLoop, list[tuple[Stream, Delta]]] = {}
        for delta in deltas:
            stream = self._streams.get(delta.group)
            if stream is not None:
                loops.setdefault(stream.loop, []).append((stream, delta))
        ended = [delta for delta in deltas if delta.finish_reason is not None]
        self._ended(len(ended))
        for group in {delta.group for delta in ended}:
            if not self.engine.has(group):
                self._streams.pop(group, None)
        for loop, pairs in loops.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_put, pairs)

    def _ended(self, count: int) -> None:
        with self._lock:
            self._sequences -= count


def _put(pairs: Sequence[tuple[Stream, Delta]]) -> None:
    for stream, delta in pairs:
        stream.arrived.put_nowait(delta)
