"""One sequence on its way: what is known of it, which blocks it holds, what happened to it and when."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field

from mgraph.runtime.serving.blocks import Content, Tables
from mgraph.runtime.serving.parameters import SamplingParams


class Status(enum.Enum):
    """Where a sequence is. It ends once, from any of the others."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


class Happening(enum.Enum):
    """What can happen to a sequence: first it arrives, last it ends; what lies between may come several times."""

    ARRIVED = "arrived"
    ADMITTED = "admitted"
    PREEMPTED = "preempted"
    ENDED = "ended"


@dataclass(frozen=True)
class Event:
    """Something that happened, at a time of `time.monotonic`."""

    what: Happening
    when: float


@dataclass(eq=False)
class Request:
    """One sequence. A prompt with n continuations is n of these, which share the blocks of the prompt.

    Tokens are known when their step's results have come; of one that is sampled by a step still under way only the
    number is known (`in_flight`).
    """

    number: int
    """Counts arrivals: the smaller came first, and keeps its blocks where there are not enough."""
    prompt: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    """Of the output."""
    seed: int = 0
    leader: Request | None = None
    """Another continuation of the same prompt, whose blocks are worth waiting for."""
    needs_known: bool = False
    """Whether its next token cannot be sampled before the one before is known."""
    output: list[int] = field(default_factory=list)
    in_flight: int = 0
    computed: int = 0
    """Tokens in the cache, those of steps under way included."""
    tables: Tables = field(default_factory=lambda: Tables(1))
    """Its blocks, which the scheduler gives it."""
    preempted: int = 0
    """How often it had to give its blocks back."""
    remembered: int = 0
    """How many of its blocks the pool was told the content of."""
    content: Content | None = None
    """The last of these contents."""
    cached: int = 0
    """Tokens of the prompt that were found in the cache when it was first admitted."""
    prompt_rows: int = 0
    """Tokens of the prompt whose log-probabilities were asked for in steps planned so far."""
    arrived: float = 0.0
    """When it came, by `time.monotonic`."""
    queued: float | None = None
    """Seconds from then until it was first admitted."""
    status: Status = Status.WAITING
    events: list[Event] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens in all, those in flight included."""
        return len(self.prompt) + len(self.output) + self.in_flight

    @property
    def sampled(self) -> int:
        """Tokens of the output, those in flight included."""
        return len(self.output) + self.in_flight

    @property
    def decodes(self) -> bool:
        """Whether its next token is all that it lacks."""
        sampled = len(self.output) + self.in_flight
        return sampled > 0 and 0 < self.computed == len(self.prompt) + sampled - 1

    @property
    def complete(self) -> bool:
        """Whether it has as many tokens as it may have, some perhaps in flight."""
        return self.sampled >= self.max_tokens

    def known(self, start: int, stop: int) -> tuple[int, ...]:
        """Tokens start:stop of prompt and output."""
        size = len(self.prompt)
        if stop <= size:
            return self.prompt[start:stop]
        return self.prompt[start:] + tuple(self.output[max(start - size, 0) : stop - size])

    def record(self, what: Happening) -> None:
        """Note that something happens now."""
        event = Event(what, time.monotonic())
        self.events.append(event)
        if what is Happening.ARRIVED:
            self.arrived = event.when
        elif what is Happening.ADMITTED and self.queued is None:
            self.queued = event.when - self.arrived
