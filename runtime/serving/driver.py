"""What makes an engine's steps: a thread of its own, which nobody who asks for something ever waits in.

Handlers of signals run in the main thread between any two of its instructions, and what is collected ends wherever
Python happens to collect it. Neither finds a step half done, nor a lock that it would wait for itself: what others want
done they put into a queue, which is safe in both.
"""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mgraph.errors import OptionError
from mgraph.runtime.serving.engine import Delta, Engine, EngineDead, told
from mgraph.runtime.serving.parameters import SamplingParams

_PATIENCE = 10.0  # seconds that a step may take at the end
_GLANCE = 0.2  # seconds; a signal that comes just before a thread falls asleep is seen only when it wakes

T = TypeVar("T")

Taker = Callable[[Delta], None]
"""Where what comes of a request goes. It is called by the thread that hands over, and neither waits for another nor
raises."""


@dataclass
class _Open:
    take: Taker
    left: set[int]
    """Continuations that have not ended."""


class Driver:
    """Makes steps while anything is under way, and hands each request what comes of it, each continuation to its end
    and no further. `submit` and `abort` are for work that was asked for: only the driver's thread uses the engine."""

    def __init__(self, engine: Engine, after: Callable[[Sequence[Delta]], None] = lambda deltas: None) -> None:
        """`after` sees the deltas of a step when they have been handed over."""
        self.engine = engine
        self._after = after
        self._requests: dict[int, _Open] = {}
        self._handing = threading.Lock()  # of `_requests`, for `end_all`, which another thread may do
        self._works: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin. The end of the program stops it. Raises OptionError for an engine that has a driver."""
        if self.engine.driven:
            raise OptionError("another LLM or server has this engine", hint="an engine for each")
        self._thread.start()
        self.engine.driven = True
        atexit.register(self.stop, None)

    def stop(self, patience: float | None = _PATIENCE) -> None:
        """End all requests and the thread, which is left to itself where a step takes longer than so many seconds. The
        end of the program waits for it: a thread that is amid torch's code then would abort the process."""
        atexit.unregister(self.stop)
        if self._thread.ident is None:  # it has never begun
            self._stopped = True
            return
        self.do(self._stop)
        if self._thread is not threading.current_thread():  # what holds a driver may be collected there
            self._thread.join(patience)

    def submit(self, prompt: Sequence[int], params: SamplingParams, take: Taker) -> int:
        """Begin a request; gives its number. Raises RequestError, EngineDead."""
        if self._stopped:
            raise EngineDead("the engine was stopped")
        group = self.engine.submit(prompt, params)
        with self._handing:
            self._requests[group] = _Open(take, set(range(params.n)))
        return group

    def abort(self, group: int) -> None:
        """End a request, if it has not ended."""
        self._deliver(self.engine.abort(group))

    def end_all(self, reason: str, error: str | None = None) -> None:
        """Tell all requests that nothing more comes of them, those too that are begun meanwhile; the engine hears of it
        after its step. Any thread may, as the driver's own may hang in one, but no handler of a signal."""
        try:
            self._tell_all(reason, error)
        finally:
            self.do(lambda: self._deliver(self.engine.end_all(reason, error)))

    def do(self, work: Callable[[], object]) -> None:
        """Have something done with the engine, between two steps, in the order in which it is asked for. This never
        waits, and may be called from anywhere."""
        self._works.put(work)
        if self._stopped:  # nobody else would do it
            self._work(wait=False)

    def ask(self, work: Callable[[], T]) -> T:
        """What `work` gives, or raises, between two steps. A signal may end the waiting; the work is done then, too."""
        answer: queue.SimpleQueue[tuple[T, None] | tuple[None, BaseException]] = queue.SimpleQueue()

        def answering() -> None:
            try:
                answer.put((work(), None))
            except BaseException as error:
                answer.put((None, error))

        self.do(answering)
        result, error = self.wait_for(answer)
        if error is not None:
            raise error
        return result  # type: ignore[return-value]  # of type T where there is no error

    def wait_for(self, arriving: queue.SimpleQueue[T]) -> T:
        """What comes next. What a signal's handler raises ends the waiting. Raises EngineDead where nothing can come:
        the thread has ended, or is that of a process of which this one is a copy, or is this one, as where it collects
        what waits for it."""
        while True:
            if self._thread is threading.current_thread():
                raise EngineDead("the thread that makes steps cannot wait for one")
            try:
                return arriving.get(timeout=_GLANCE)
            except queue.Empty:
                if not self._thread.is_alive() and arriving.empty():
                    reason = self.engine.trouble or "its thread has ended, or is that of another process"
                    raise EngineDead(f"nothing makes steps any more: {reason}") from None

    def _run(self) -> None:
        try:
            while not self._stopped:
                try:
                    self._work(wait=not self.engine.unfinished)
                    self._deliver(self.engine.step() if self.engine.unfinished else [])
                except BaseException as error:  # a mistake of ours, whatever it is: nobody may wait for ever
                    self.engine.failure = self.engine.failure or error
                    self._end_all("error", told(error))
        finally:
            self._stopped, self.engine.driven = True, False
            self._work(wait=False)

    def _work(self, wait: bool) -> None:
        """Do what has been asked for; `wait` until there is something."""
        try:
            while True:
                self._works.get(block=wait)()
                wait = False
        except queue.Empty:
            return

    def _deliver(self, deltas: Sequence[Delta]) -> None:
        with self._handing:
            taken = [delta for delta in deltas if self._takes(delta)]
        if taken:
            self._after(taken)

    def _takes(self, delta: Delta) -> bool:
        """Hand over, unless that continuation was told its end."""
        request = self._requests.get(delta.group)
        if request is None or delta.index not in request.left:
            return False
        if delta.finish_reason is not None:
            request.left.remove(delta.index)
            if not request.left:
                del self._requests[delta.group]
        request.take(delta)
        return True

    def _tell_all(self, reason: str, error: str | None) -> None:
        with self._handing:
            left = [(group, index) for group, request in self._requests.items() for index in request.left]
        self._deliver([Delta(group, index, finish_reason=reason, error=error) for group, index in left])

    def _end_all(self, reason: str, error: str | None = None) -> None:
        """As `end_all`, in the driver's thread: requests first, as the engine may fail in this, too."""
        self._tell_all(reason, error)
        self._deliver(self.engine.end_all(reason, error))

    def _stop(self) -> None:
        try:
            self._end_all("abort")
        finally:
            self._stopped = True
