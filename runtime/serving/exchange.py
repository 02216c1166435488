"""One HTTP request with the engine's requests behind it, and the events of its stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from mgraph.runtime.serving.answers import Chats, Completions, Echo, Heading, error_body, event, usage
from mgraph.runtime.serving.background import BackgroundEngine, Stream
from mgraph.runtime.serving.engine import Delta, Score
from mgraph.runtime.serving.llm import Gathering, RequestOutput
from mgraph.runtime.serving.parameters import SamplingParams

DONE = event("[DONE]")


class Exchange:
    """The prompts of one HTTP request. Their deltas come through one queue."""

    def __init__(self, background: BackgroundEngine) -> None:
        self._background = background
        self._arrived: asyncio.Queue[Delta] = asyncio.Queue()
        self._streams: list[Stream] = []
        self._gathered: list[Gathering] = []
        self.failure: str | None = None
        """What the first sequence that did not end by itself says."""
        self.n = 1

    async def submit(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Begin one prompt. Raises RequestError, Overloaded, EngineDead."""
        self._streams.append(await self._background.submit(prompt, params, self._arrived))
        self._gathered.append(Gathering(None, prompt, params))
        self.n = params.n

    def close(self) -> None:
        """End what has not ended."""
        for stream in self._streams:
            stream.close()

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """What comes, with the index of its prompt, until all have ended or one failed."""
        places = {stream.group: at for at, stream in enumerate(self._streams)}
        while any(stream.left for stream in self._streams):
            delta = await self._arrived.get()
            at = places[delta.group]
            self._streams[at].left -= delta.finish_reason is not None
            self._gathered[at].add(delta)
            if delta.finish_reason in ("abort", "error"):
                self.failure = delta.error or "the request was ended by the server"
                return
            yield at, delta

    async def finish(self) -> None:
        """Wait for the end."""
        async for _ in self.deltas():
            pass

    def output(self, at: int) -> RequestOutput:
        """What there is of one prompt."""
        return self._gathered[at].result()

    def outputs(self) -> list[RequestOutput]:
        """What there is of all."""
        return [gathering.result() for gathering in self._gathered]


async def chat_events(exchange: Exchange, heading: Heading, choices: Chats) -> AsyncGenerator[bytes, None]:
    """The stream of a chat: for each choice its role, then what it says."""
    begun: set[int] = set()
    async for _, delta in exchange.deltas():
        index = delta.index
        if index not in begun:
            begun.add(index)
            yield event(heading.body([choices.chunk(index, {"role": "assistant", "content": ""})], True))
        if delta.text or delta.scores or delta.finish_reason is not None:
            said = {"content": delta.text} if delta.text else {}
            yield event(heading.body([choices.chunk(index, said, delta)], True))
    for last in _end(exchange, heading):
        yield last


async def completion_events(
    exchange: Exchange, heading: Heading, choices: Completions, prompts: Sequence[Echo]
) -> AsyncGenerator[bytes, None]:
    """The stream of completions; with echo each choice begins with its prompt, as soon as all of that is known."""
    begun: set[int] = set()
    early: dict[int, list[Delta]] = {}
    scores: dict[int, tuple[Score | None, ...]] = {}  # of prompts that are wanted and known
    async for at, delta in exchange.deltas():
        early.setdefault(at, []).append(delta)
        if choices.echo and choices.logprobs and at not in scores:
            output = exchange.output(at)
            if len(output.prompt_logprobs or ()) < len(output.prompt_token_ids):
                continue
            scores[at] = choices.of_prompt(output)
        for one in early.pop(at):
            index = at * exchange.n + one.index
            if choices.echo and index not in begun:
                begun.add(index)
                yield event(heading.body([choices.begin(index, prompts[at], scores.get(at, ()))], True))
            if one.text or one.scores or one.finish_reason is not None:
                yield event(heading.body([choices.chunk(index, one.text, one.scores, one)], True))
    for last in _end(exchange, heading):
        yield last


def _end(exchange: Exchange, heading: Heading) -> list[bytes]:
    """What comes after the last choice. The status was sent long ago, so an error is an event of its own."""
    if exchange.failure is not None:
        return [event(error_body(exchange.failure, "server_error", None, "request_failed")), DONE]
    if not heading.wants_usage:
        return [DONE]
    numbers: dict[str, Any] = usage(exchange.outputs())
    return [event(heading.body([], True, usage=numbers)), DONE]
