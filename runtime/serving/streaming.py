"""Work that ends before its time, as responses do when the client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")


class Closable(Protocol):
    """What has to be closed whatever happens."""

    def close(self) -> None:
        """Let go of everything."""
        ...


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client goes away first. Raises ClientDisconnect."""
    return await unless(_gone(request.receive), work, ClientDisconnect())


async def unless(event: Coroutine[Any, Any, Any], work: Coroutine[Any, Any, T], error: Exception) -> T:
    """The result of `work`. If `event` ends first, `work` is cancelled, and `error` raised."""
    working, ended = asyncio.ensure_future(work), asyncio.ensure_future(event)
    try:
        await asyncio.wait({working, ended}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise error
    finally:
        for task in (working, ended):
            task.cancel()
        await asyncio.gather(working, ended, return_exceptions=True)


class EventStream(Response):
    """Server-sent events. The exchange behind them is closed in the end, however it comes."""

    def __init__(self, exchange: Closable, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )
        del self.headers["content-length"]
        self._exchange, self._events = exchange, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events as they come."""
        try:
            await unless(_gone(receive), self._send(send), ClientDisconnect())
        except ClientDisconnect:
            pass
        finally:
            self._exchange.close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
