"""A driven engine for programs with an event loop: the loop never waits for a step.

What comes of requests goes back in one call into the loop for each step, however many requests it has something for.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial

from mgraph.errors import MgraphError
from mgraph.runtime.serving.driver import Driver
from mgraph.runtime.serving.engine import Delta, Engine, EngineDead
from mgraph.runtime.serving.parameters import SamplingParams


class Overloaded(MgraphError):
    """More requests are under way than are allowed; this one may come again later."""


class Stream:
    """One request in an event loop, to be closed in the end. Whoever takes its deltas counts what is `left`."""

    def __init__(self, owner: BackgroundEngine, count: int, arrived: asyncio.Queue[Delta]) -> None:
        self.group = -1
        self.arrived, self.loop = arrived, asyncio.get_running_loop()
        self.left = count
        """Continuations that go on."""
        self._owner = owner

    def close(self) -> None:
        """End the request, if it has not ended."""
        if self.left:
            self._owner.abort(self.group)
            self.left = 0


class BackgroundEngine:
    """Serves requests from event loops. `start` it first, and `stop` it in the end."""

    def __init__(
        self, engine: Engine, max_queue: int = 0, watch: Callable[[Sequence[Delta]], None] | None = None
    ) -> None:
        """At most `max_queue` sequences may be under way (0: any number). `watch` sees the deltas of each step."""
        self.engine = engine
        self._max_queue = max_queue
        self._watch = watch or (lambda deltas: None)
        self._arrived: dict[asyncio.AbstractEventLoop, list[tuple[Stream, Delta]]] = {}  # and not handed over yet
        self._asked: set[Future[int]] = set()
        """Of requests that the engine has not taken yet."""
        self._sequences = 0  # asked for and not ended
        self._lock = threading.Lock()  # of what threads of loops and of the engine change
        self._driver = Driver(engine, self._after)

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

    async def submit(self, prompt: Sequence[int], params: SamplingParams, arrived: asyncio.Queue[Delta]) -> Stream:
        """Begin a request, whose deltas go to `arrived`. Raises RequestError, EngineDead, Overloaded."""
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
        self._driver.do(lambda: self._driver.abort(group))

    def end_all(self, why: str) -> None:
        """Tell all requests at once that nothing more comes of them, those that wait to be taken among them: the engine
        may be in a long step, or hang in one."""
        for answer in list(self._asked):
            with suppress(InvalidStateError):  # it was taken
                answer.set_exception(EngineDead(why))
        self._driver.end_all("error", why)

    def fail(self, why: str) -> None:
        """The same where nothing can be served any more: no others are taken."""
        self.engine.failure = EngineDead(why)
        self.end_all(why)

    def _submit(self, prompt: Sequence[int], params: SamplingParams, stream: Stream, answer: Future[int]) -> None:
        if answer.done():  # whoever asked has gone, or was told that nothing comes
            self._ended(params.n)
            return
        try:
            group = self._driver.submit(prompt, params, partial(self._take, stream))
        except BaseException as error:
            self._ended(params.n)
            with suppress(InvalidStateError):  # that happened just now
                answer.set_exception(error)
            return
        try:
            answer.set_result(group)
        except InvalidStateError:
            self._driver.abort(group)

    def _abandon(self, answer: Future[int]) -> None:
        """Whoever asked has gone, perhaps after the request began."""
        if not answer.cancelled() and answer.exception() is None:
            self.abort(answer.result())

    def _take(self, stream: Stream, delta: Delta) -> None:
        with self._lock:
            self._arrived.setdefault(stream.loop, []).append((stream, delta))

    def _after(self, deltas: Sequence[Delta]) -> None:
        self._hand_over()
        self._ended(sum(delta.finish_reason is not None for delta in deltas))
        self._watch(deltas)

    def _hand_over(self) -> None:
        closed: set[int] = set()
        with self._lock:  # also while they are given away: what another thread has comes after it
            for loop, pairs in self._arrived.items():
                try:
                    loop.call_soon_threadsafe(_put, pairs)
                except RuntimeError:  # it was closed, and nobody waits there any more
                    closed.update(delta.group for _, delta in pairs)
            self._arrived = {}
        for group in closed:
            self.abort(group)

    def _ended(self, count: int) -> None:
        with self._lock:
            self._sequences -= count


def _put(pairs: Sequence[tuple[Stream, Delta]]) -> None:
    for stream, delta in pairs:
        stream.arrived.put_nowait(delta)
