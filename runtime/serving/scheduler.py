"""Which tokens of which requests a step computes. No clock, no chance: the same arrivals give the same plans.

Requests are admitted in the order of their arrival, and none overtakes the first that waits. Each that writes gets its
one token in every step; what is left of the step's tokens goes to prompts, in chunks, the oldest first. Where blocks
run out, the request that came last gives all of its own back and waits again, at its place by arrival; what it had is
computed anew when it is admitted again. The oldest is never the last while there are others, and every request fits
alone: so the oldest goes on in every step, and each ends.

In groups of layers with a window a request gives back what its next token does not see, when the next step is planned:
steps run in order, so whoever gets the block writes to it after all who read it.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from mgraph.runtime.serving.blocks import BlockPool, Content, Tables
from mgraph.runtime.serving.request import Happening, Request, Status


@dataclass(frozen=True)
class Work:
    """Tokens start:stop of a request, to compute in one step."""

    request: Request
    start: int
    stop: int
    samples: bool
    """Whether the last of them gives a new token."""
    targets: range
    """Of these positions, the log-probability of the prompt's token that follows is wanted."""
    draw: int
    """How many tokens the request has sampled before."""


@dataclass
class Counts:
    """What has happened since the start."""

    preemptions: int = 0
    prefix_queries: int = 0
    """Tokens of admitted prompts that were looked up in the cache."""
    prefix_hits: int = 0
    """Those that were."""


def most_rows(max_requests: int) -> int:
    """The most rows of logits of a step: one for each of its requests, and those of prompts whose log-probabilities are
    asked for. Where few requests run there are more of the latter, and as many fewer of the former."""
    return max_requests + max(max_requests // 2, 1)


class Scheduler:
    """Waiting and running requests, and the blocks that these hold."""

    def __init__(self, pool: BlockPool, max_tokens: int, max_requests: int, chunk: int = 0) -> None:
        """A step has at most `max_tokens` tokens of `max_requests` requests, `chunk` of a prompt (0: what fits)."""
        assert max_tokens >= max_requests >= 1, "each running request must get one token of a step"
        self.pool, self.max_tokens, self.max_requests = pool, max_tokens, max_requests
        self.chunk = chunk or max_tokens
        self._windows = any(window is not None for window in pool.windows)
        self._half = most_rows(max_requests) - max_requests
        self._rows = 0  # of prompts, that are left in a step
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        """Both in the order of arrival."""
        self.counts = Counts()

    def add(self, request: Request) -> None:
        """A new request waits."""
        assert self.pool.most(len(request.prompt) + request.max_tokens - 1) <= self.pool.usable, "it never fits"
        request.tables, request.content = self.pool.tables(), self.pool.root
        request.record(Happening.ARRIVED)
        _insert(self.waiting, request)

    def end(self, request: Request) -> bool:
        """A request ends, for whatever reason, and gives its blocks back. False: it had ended before."""
        if request.status is Status.ENDED:
            return False
        (self.running if request.status is Status.RUNNING else self.waiting).remove(request)
        self._empty(request)
        request.status = Status.ENDED
        request.record(Happening.ENDED)
        return True

    def plan(self) -> list[Work]:
        """The work of the next step, single tokens first; empty where there is none.

        Of each the longest texts come first: attention's programs begin in this order, and those that begin last, when
        others have ended, are short then (longest processing time first, Graham 1969, doi:10.1137/0117039).
        """
        works: list[Work] = []
        for request in self.running if self._windows else ():
            self.pool.give_back(request.tables.give_up(self.pool.seen(request.computed)))
        # Logits are large: those of prompts are of so many rows a step, whatever its tokens.
        self._rows = max(self.max_requests - len(self.running), self._half)
        writing = {r for r in self.running if r.decodes and not r.complete}
        budget = self.max_tokens - len(writing)
        preempted = False
        for request in list(self.running):
            writes = request in writing
            if request.status is not Status.RUNNING or (not writes and request.complete):
                continue  # preempted just now, or waiting for its last results
            if request.needs_known and request.in_flight:
                continue
            todo = 1 if writes else min(request.length - request.computed, budget, self.chunk)
            if self._windows and not writes:
                todo = min(todo, self._fits(request, self.pool.usable - request.tables.held))
            count = 1 if writes else self._rows_allow(request, todo)
            if count == 0:
                continue
            preempted |= not self._make_room(request, count)
            if request.status is not Status.RUNNING:
                continue
            budget -= 0 if writes else count
            works.append(self._work(request, count))
        if self.waiting and not preempted and len(self.running) < self.max_requests:
            self._admit(works, budget)
        for work in works:
            self._remember(work.request)
        return sorted(works, key=lambda work: (work.stop - work.start > 1, -work.stop, work.request.number))

    def forget_all(self) -> None:
        """Remember nothing of what was computed so far, nor of what running requests add to it."""
        self.pool.forget_all()
        for request in self.running:
            request.content = self.pool.apart()

    def check(self) -> None:
        """Assert what must hold between two steps."""
        self.pool.check([r.tables.all() for r in (*self.running, *self.waiting)])
        assert all(not r.tables.held for r in self.waiting)
        assert len(self.running) <= self.max_requests

    def _make_room(self, request: Request, count: int) -> bool:
        """Get the blocks for `count` more tokens. False: the youngest were sent away for it, this one perhaps too."""
        more = self._lacking(request, count)
        if more == 0:
            return True
        enough = True
        while self.pool.available < more and request.status is Status.RUNNING:
            self._preempt(self.running[-1])
            enough = False
        if request.status is Status.RUNNING:
            request.tables.add(self.pool.take(more))
        return enough

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._empty(request)
        request.computed, request.remembered = 0, 0
        request.preempted += 1
        request.status = Status.WAITING
        request.record(Happening.PREEMPTED)
        self.counts.preemptions += 1
        _insert(self.waiting, request)

    def _admit(self, works: list[Work], budget: int) -> None:
        """Admit from the front while there is room for all that is known of the first that waits."""
        promised = sum(self._promised(r) for r in self.running if not r.complete)
        begun = {work.request for work in works}
        most = min(self.max_requests, len(self.running) + self._half)
        while self.waiting and budget > 0 and len(self.running) < most:
            request = self.waiting[0]
            if request.params.prompt_logprobs is not None and not self._rows:
                return
            if request.complete or request.in_flight:
                return  # preempted with its token under way: its results come first
            leader = request.leader
            if leader is not None and leader.status is Status.RUNNING and (leader in begun and leader.sampled <= 1):
                return  # from the next step on, the prompt's blocks are there to be shared
            if leader is not None and leader.status is Status.RUNNING and leader.sampled == 0:
                return
            found, content = self._match(request)
            blocks, computed = found.all(), found.length * self.pool.block_size
            todo = min(self._most(request, computed), self.pool.usable) - len(blocks)
            if self.pool.available - self.pool.idle(blocks) - promised < todo:
                return
            # All needs are known and met: from here on nothing can fail.
            self.waiting.pop(0)
            self.pool.hold(blocks)
            request.tables, request.remembered, request.content = found, found.length, content
            request.computed = computed
            todo = min(request.length - computed, budget, self.chunk, self._fits(request, self.pool.available))
            count = self._rows_allow(request, todo)
            request.tables.add(self.pool.take(self._lacking(request, count)))
            promised += self._promised(request)
            request.status = Status.RUNNING
            self._count(request)
            request.record(Happening.ADMITTED)
            _insert(self.running, request)
            works.append(self._work(request, count))
            begun.add(request)
            budget -= count

    def _empty(self, request: Request) -> None:
        """Give all blocks of a request back."""
        self.pool.give_back(request.tables.all())
        request.tables, request.content = self.pool.tables(), self.pool.root

    def _lacking(self, request: Request, count: int) -> int:
        """Blocks, of all groups, that `count` more tokens take beside those that it has."""
        short = request.computed + count - request.tables.length * self.pool.block_size
        return 0 if short <= 0 else self.pool.needed(short) * len(self.pool.windows)

    def _fits(self, request: Request, blocks: int) -> int:
        """How many more tokens so many more blocks hold."""
        more = blocks // len(self.pool.windows)
        return (request.tables.length + more) * self.pool.block_size - request.computed

    def _most(self, request: Request, computed: int) -> int:
        """The most blocks that it holds until all that is known of it is computed."""
        return self.pool.most(request.length, max(1, min(self.chunk, request.length - computed)))

    def _promised(self, request: Request) -> int:
        """Blocks that it lacks for all that is known of it."""
        return max(0, self._most(request, request.computed) - request.tables.held)

    def _match(self, request: Request) -> tuple[Tables, Content]:
        """Remembered blocks of its beginning, the last token left out: it must be computed to give logits."""
        if not self._is_looked_up(request):
            return self.pool.tables(), self.pool.root
        return self.pool.match(request.known(0, request.length - 1))

    def _is_looked_up(self, request: Request) -> bool:
        """Not while log-probabilities of its prompt are wanted, which have to be computed."""
        return request.params.prompt_logprobs is None or request.prompt_rows >= len(request.prompt) - 1

    def _count(self, request: Request) -> None:
        if request.queued is None:
            request.cached = request.computed
            looked = self.pool.remembers and self._is_looked_up(request)
            self.counts.prefix_queries += len(request.prompt) if looked else 0
            self.counts.prefix_hits += request.cached

    def _targets(self, request: Request, stop: int) -> range:
        """The positions before `stop` after which the log-probability of the prompt's token is wanted and not asked."""
        if request.params.prompt_logprobs is None:
            return range(0)
        return range(max(request.computed, request.prompt_rows), min(stop, len(request.prompt) - 1))

    def _rows_allow(self, request: Request, count: int) -> int:
        """How many of the next `count` tokens there are rows for."""
        targets = self._targets(request, request.computed + count)
        return targets[self._rows] - request.computed if len(targets) > self._rows else count

    def _work(self, request: Request, count: int) -> Work:
        """`count` more tokens of a request that has the blocks for them."""
        start, stop = request.computed, request.computed + count
        targets = self._targets(request, stop)
        self._rows -= len(targets)
        request.prompt_rows = max(request.prompt_rows, targets.stop)
        samples = stop == request.length
        work = Work(request, start, stop, samples, targets, request.sampled)
        request.computed = stop
        request.in_flight += samples
        return work

    def _remember(self, request: Request) -> None:
        """Tell the pool what is in the blocks that this step completes, as far as the tokens are known."""
        assert request.content is not None, "it was added"
        size = self.pool.block_size
        known = min(request.computed, len(request.prompt) + len(request.output))
        while (request.remembered + 1) * size <= known:
            start = request.remembered * size
            tokens = request.known(start, start + size)
            blocks = [row[request.remembered] for row in request.tables.blocks]
            request.content = self.pool.remember(blocks, request.content, tokens)
            request.remembered += 1


def _insert(requests: list[Request], request: Request) -> None:
    bisect.insort(requests, request, key=lambda r: r.number)
