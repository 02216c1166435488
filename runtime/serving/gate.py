"""What every HTTP request passes: it gets a number, shows its key, and is counted while it is answered.

It is under way from the end of its body on, or from the beginning of its answer, if that comes before.
"""

from __future__ import annotations

import hmac
import re
import uuid
from typing import Protocol

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mgraph.runtime.serving.answers import error_body

_SAFE = re.compile(r"[\x21-\x7e]{1,128}")


class Counted(Protocol):
    """What the gate reads and changes."""

    api_key: str
    requests: int


class Gate:
    """An application around another. Paths below /v1 need the key, if there is one; only health does not."""

    def __init__(self, inner: ASGIApp, serving: Counted) -> None:
        self._inner, self._serving = inner, serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        number = given if _SAFE.fullmatch(given) else uuid.uuid4().hex

        counted = False

        def count() -> None:
            nonlocal counted
            self._serving.requests += not counted
            counted = True

        async def received() -> Message:
            message = await receive()
            if not message.get("more_body", False):
                count()
            return message

        async def numbered(message: Message) -> None:
            count()
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = number
            await send(message)

        try:
            if self._allows(scope["path"], headers.get("authorization", "")):
                await self._inner(scope, received, numbered)
            else:
                message = "the API key is missing or wrong: send it as Authorization: Bearer KEY"
                body = error_body(message, "authentication_error", None, "invalid_api_key")
                await JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})(scope, received, numbered)
        finally:
            self._serving.requests -= counted

    def _allows(self, path: str, authorization: str) -> bool:
        key = self._serving.api_key
        if not key or not path.startswith("/v1") or path == "/v1/health":
            return True
        scheme, _, given = authorization.partition(" ")
        sent = given.strip().encode("latin-1")  # as which the bytes of headers are read
        return scheme.lower() == "bearer" and hmac.compare_digest(sent, key.encode())
