"""The engine behind HTTP, as clients of OpenAI's API expect it: completions, chat, models, health, metrics, a page.

A request that is wrong, too large, or one too many gets a JSON error with the code for it, and touches nothing else. A
client that goes away ends its request. While the server drains, it refuses new requests and finishes those it has.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from mgraph.errors import DataError
from mgraph.runtime.chat import ChatTemplate
from mgraph.runtime.serving.answers import Chats, Completions, Echo, Heading, error_body, usage
from mgraph.runtime.serving.apart import Apart
from mgraph.runtime.serving.background import BackgroundEngine, Overloaded
from mgraph.runtime.serving.engine import Engine, EngineDead
from mgraph.runtime.serving.exchange import Exchange, chat_events, completion_events
from mgraph.runtime.serving.gate import Gate
from mgraph.runtime.serving.metrics import CONTENT_TYPE, Metrics
from mgraph.runtime.serving.parameters import RequestError, SamplingParams
from mgraph.runtime.serving.prompts import Input, read_chat, read_prompt
from mgraph.runtime.serving.protocol import MOST_UNASKED, ChatRequest, CompletionRequest, openapi, refusal
from mgraph.runtime.serving.streaming import EventStream, unless, until_disconnect

PAGE = Path(__file__).with_name("page.html")

SHUTTING_DOWN = "the server is shutting down"

_LONG = 16 * 2**10  # bytes of a body that is read in milliseconds
_THREADS = 8  # that read long bodies
_SHOWN = 200  # characters of what is wrong


@dataclass
class Serving:
    """What the server is made of, and its state."""

    engine: Engine
    model: str
    template: ChatTemplate | None = None
    api_key: str = ""
    max_queue: int = 1024
    """Sequences that may be under way."""
    max_body: int = 4 * 2**20
    """Bytes of a request."""
    requests: int = 0
    """HTTP requests that are under way: their bodies have come, and they are being answered."""
    created: int = 0
    stopping: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    """Set when it begins to drain."""
    background: BackgroundEngine = field(init=False)
    metrics: Metrics = field(init=False)

    def __post_init__(self) -> None:
        """Metrics and thread belong to the engine."""
        self.metrics = Metrics(self.engine, self.model)
        self.background = BackgroundEngine(self.engine, self.max_queue, self.metrics.watch)

    @property
    def draining(self) -> bool:
        """Whether requests under way are finished, and no others taken."""
        return self.stopping.is_set()

    @property
    def trouble(self) -> str | None:
        """Why no request is taken, if none is."""
        return self.engine.trouble or (SHUTTING_DOWN if self.draining else None)


def create_app(serving: Serving) -> Gate:
    """The application. Its engine is started and stopped by whoever runs it."""
    server = _Server(serving)
    routes = [
        Route("/", server.page),
        Route("/v1/completions", server.completions, methods=["POST"]),
        Route("/v1/chat/completions", server.chat, methods=["POST"]),
        Route("/v1/models", server.models),
        Route("/v1/models/{name:path}", server.one_model),
        Route("/health", server.health),
        Route("/v1/health", server.health),
        Route("/metrics", server.metrics),
        Route("/openapi.json", server.description),
    ]
    handlers: dict[Any, Any] = {HTTPException: _http_error, Exception: _our_mistake}
    return Gate(Starlette(routes=routes, exception_handlers=handlers), serving)


class _Refused(Exception):
    """An error that has its response."""

    def __init__(self, code: int, message: str, kind: str, param: str | None = None, name: str | None = None) -> None:
        super().__init__(message)
        headers = {"Retry-After": "1"} if code in (429, 503) else {}
        if code == 503:
            headers["Connection"] = "close"
        self.response = JSONResponse(error_body(message, kind, param, name), code, headers)


def _unavailable(trouble: str) -> _Refused:
    return _Refused(503, trouble, "server_error", None, "unavailable")


B = TypeVar("B", bound=BaseModel)
T = TypeVar("T")


def _answering(handler: Callable[[Any, Request], Coroutine[Any, Any, Response]]) -> Any:
    """Every error that a request can cause becomes its response."""

    async def answer(self: Any, request: Request) -> Response:
        try:
            return await handler(self, request)
        except _Refused as refused:
            return refused.response
        except RequestError as error:
            message = f"{error.message} ({error.hint})" if error.hint else error.message
            return JSONResponse(error_body(message, "invalid_request_error", error.param), 400)
        except DataError as error:  # of a chat template
            return JSONResponse(error_body(error.message, "invalid_request_error", "messages"), 400)
        except Overloaded as error:
            body = error_body(f"{error.message}; {error.hint}", "rate_limit_error", None, "overloaded")
            return JSONResponse(body, 429, {"Retry-After": "1"})
        except EngineDead as error:
            return JSONResponse(error_body(error.message, "server_error", None, "engine_dead"), 503)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it

    return answer


class _Server:
    def __init__(self, serving: Serving) -> None:
        self.serving = serving
        self._apart = Apart(_THREADS)

    async def _asked(self, request: Request, kind: type[B], ask: Callable[[B], T]) -> T:
        """What a body asks for, in tokens. Of a long one a thread makes it, so that everyone else is answered
        meanwhile; a client that goes away is not waited for. Raises what `_answering` answers."""
        raw = await self._body(request)

        def work() -> T:
            try:
                body = kind.model_validate(_json(raw))
            except ValidationError as error:
                raise refusal(error, kind) from error
            self._check_model(getattr(body, "model", None))
            return ask(body)

        return await until_disconnect(request, self._apart(work)) if len(raw) > _LONG else work()

    @_answering
    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        engine, tokenizer = self.serving.engine, self.serving.engine.tokenizer

        def ask(body: CompletionRequest) -> tuple[CompletionRequest, SamplingParams, list[Input], list[Echo]]:
            params, given = body.params(), body.prompts()
            ids = [read_prompt(engine, one) for one in given]
            if body.max_tokens is None:  # of those that nobody asked for as many as fit
                room = engine.longest - max(len(prompt.ids) for prompt in ids)
                params = params.with_max_tokens(max(1, min(MOST_UNASKED, room)))
            for prompt in ids:  # before they are made text of
                engine.check(prompt.ids, params, prompt.field)
            return body, params, ids, [Echo.of(tokenizer, one) if body.echo else Echo() for one in given]

        body, params, prompts, echoes = await self._asked(request, CompletionRequest, ask)
        exchange = await self._begin(prompts, params)
        heading = Heading(self.serving.model, chat=False, wants_usage=_wants_usage(body))
        choices = Completions(tokenizer, [prompt.ids for prompt in prompts], params, bool(body.echo))
        if body.stream:
            return EventStream(exchange, completion_events(exchange, heading, choices, echoes))
        await self._gather(request, exchange)
        outputs = exchange.outputs()
        whole = choices.whole(outputs, echoes)
        return JSONResponse(heading.body(whole, False, usage=usage(outputs)))

    @_answering
    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        engine, template = self.serving.engine, self.serving.template

        def ask(body: ChatRequest) -> tuple[ChatRequest, SamplingParams, Input]:
            params = body.params()
            messages = [message.model_dump(exclude_unset=True) for message in body.messages]
            prompt = read_chat(engine, template, messages, variables=body.chat_template_kwargs)
            engine.check(prompt.ids, params, prompt.field)
            return body, params, prompt

        body, params, prompt = await self._asked(request, ChatRequest, ask)
        exchange = await self._begin([prompt], params)
        heading = Heading(self.serving.model, chat=True, wants_usage=_wants_usage(body))
        choices = Chats(engine.tokenizer)
        if body.stream:
            return EventStream(exchange, chat_events(exchange, heading, choices))
        await self._gather(request, exchange)
        (output,) = exchange.outputs()
        return JSONResponse(heading.body(choices.whole(output), False, usage=usage([output])))

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    @_answering
    async def one_model(self, request: Request) -> Response:
        """GET /v1/models/NAME."""
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model())

    async def health(self, request: Request) -> Response:
        """Whether requests are taken."""
        trouble = self.serving.trouble
        answer = {"status": "ok" if trouble is None else "error", "ready": trouble is None, "service": "mgraph"}
        return JSONResponse(
            answer if trouble is None else {**answer, "details": trouble}, 200 if trouble is None else 503
        )

    async def metrics(self, request: Request) -> Response:
        """For Prometheus."""
        return Response(self.serving.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def description(self, request: Request) -> Response:
        """The OpenAPI description."""
        import mgraph

        bodies: dict[str, type[BaseModel]] = {
            "/v1/completions": CompletionRequest,
            "/v1/chat/completions": ChatRequest,
        }
        gets = ("/v1/models", "/v1/models/{name}", "/health", "/v1/health", "/metrics")
        return JSONResponse(openapi("mgraph", mgraph.__version__, bodies, gets))

    async def page(self, request: Request) -> Response:
        """Something to try it with."""
        text = PAGE.read_text("utf-8").replace("__CHAT__", "true" if self.serving.template is not None else "false")
        return HTMLResponse(text.replace("__MODEL__", json.dumps(self.serving.model).replace("<", "\\u003c")))

    def _model(self) -> dict[str, Any]:
        engine = self.serving.engine
        created = self.serving.created
        made = {"id": self.serving.model, "object": "model", "created": created, "owned_by": "mgraph"}
        return {**made, "max_model_len": engine.longest}

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.serving.model:
            message = f"the model '{name}' does not exist; '{self.serving.model}' is served"
            raise _Refused(404, message, "invalid_request_error", "model", "model_not_found")

    async def _body(self, request: Request) -> bytes:
        """The body as it came. Raises what `_answering` answers."""
        trouble = self.serving.trouble
        if trouble is not None:
            raise _unavailable(trouble)
        # A client that takes its time over the body does not hold up a server that drains.
        return await unless(self.serving.stopping.wait(), self._raw(request), _unavailable(SHUTTING_DOWN))

    async def _raw(self, request: Request) -> bytes:
        raw = bytearray()
        async for part in request.stream():
            raw += part
            if len(raw) > self.serving.max_body:
                message = f"the body is larger than {self.serving.max_body} bytes"
                raise _Refused(413, message, "invalid_request_error", None, "too_large")
        return bytes(raw)

    async def _begin(self, prompts: Sequence[Input], params: SamplingParams) -> Exchange:
        """Submit all prompts of a request, each of which was checked, or none."""
        total = params.n * len(prompts)
        if total > self.serving.max_queue:
            raise RequestError(
                f"{total} sequences are asked for, and at most {self.serving.max_queue} are allowed",
                "n" if total > len(prompts) else "prompt",
            )
        exchange = Exchange(self.serving.background)
        try:
            for prompt in prompts:
                await exchange.submit(prompt.ids, params)
        except BaseException:
            exchange.close()
            raise
        for prompt in prompts:
            room = self.serving.engine.longest - len(prompt.ids)
            most = room if params.max_tokens is None else params.max_tokens
            self.serving.metrics.asked(len(prompt.ids), params.n, most)
        return exchange

    async def _gather(self, request: Request, exchange: Exchange) -> None:
        """Wait for all of a response that comes at once. A client that goes away ends it."""
        try:
            await until_disconnect(request, exchange.finish())
        finally:
            exchange.close()
        if exchange.failure is not None:
            code = 503 if self.serving.trouble is not None else 500
            raise _Refused(code, exchange.failure, "server_error", None, "request_failed")


def _json(raw: bytes) -> Any:
    """A body's JSON. Raises RequestError for anything that is not, what Python would take beyond it included."""
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=_no_number)
        if rb"\u" in raw:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the body has half of a surrogate pair, {error.object[error.start]!r}, which is no text",
            hint="join it with its other half, or leave it out",
        ) from error
    except (ValueError, RecursionError) as error:
        reason = "it has a number of thousands of digits" if "int_max_str_digits" in str(error) else str(error)[:_SHOWN]
        raise RequestError(f"the body is not valid JSON: {reason}") from error
    return value


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _wants_usage(body: CompletionRequest | ChatRequest) -> bool:
    return body.stream_options is not None and body.stream_options.include_usage


async def _http_error(request: Request, error: HTTPException) -> Response:
    names = {404: "there is no such path", 405: "this path does not take this method"}
    message = f"{names.get(error.status_code, str(error.detail))}: {request.method} {request.url.path[:_SHOWN]}"
    body = error_body(message, "invalid_request_error", None, str(error.status_code))
    return JSONResponse(body, error.status_code, error.headers)


async def _our_mistake(request: Request, error: Exception) -> Response:
    body = error_body(f"internal error: {type(error).__name__}", "server_error", None, "internal_error")
    return JSONResponse(body, 500)
