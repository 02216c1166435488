"""The bodies of HTTP requests, as clients of OpenAI's API write them, with the fields that other engines add.

What is not known is refused, and so is what is known and cannot be done; fields that only name or label are taken and
not used. Types are exact: the text "1" is no number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, StrictInt, StrictStr, ValidationError

from mgraph.errors import did_you_mean
from mgraph.runtime.serving.parameters import RequestError, SamplingParams
from mgraph.runtime.serving.prompts import Prompt, Role, separate
from mgraph.runtime.serving.step import MOST_ALTERNATIVES

MOST_PROMPTS = 2048
MOST_COMPLAINTS = 1000
"""About a body: to put more of them into words takes longer than other requests should wait."""
_VALID = "Input should be a valid "
"""How a complaint about a type begins."""
MOST_UNASKED = 16
"""Tokens of a completion that says no max_tokens, or as many as fit."""


class _First(FailFast):
    """Of a list that may be long the first wrong element is told. Types that are alternatives must have a hash."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)


Texts = Annotated[list[StrictStr], _First()]
Ids = Annotated[list[StrictInt], _First()]

_SAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "min_tokens",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "skip_special_tokens",
)
"""Fields that `SamplingParams` has under the same name."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Body):
    """What a stream holds besides the text."""

    include_usage: bool = Field(False, description="end with a chunk that has the numbers of tokens")
    include_obfuscation: Literal[False] | None = Field(None, description="chunks are never padded")


class _Generation(_Body):
    """What both ways to ask have in common."""

    model: StrictStr | None = Field(None, description="a name of /v1/models (default: the one that is served)")
    n: int | None = Field(None, ge=1, le=128, description="continuations of each prompt")
    temperature: float | None = Field(None, ge=0, le=2, description="0 takes the likeliest token")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="0 or -1: all")
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="-1: none, as if it were left out")
    max_tokens: int | None = Field(None, ge=0, lt=2**31)
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    stop: StrictStr | Texts | None = None
    stop_token_ids: Ids | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = Field(None, description="token id to what is added to its logit")
    allowed_token_ids: Ids | None = None
    bad_words: Texts | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: StrictStr | None = Field(None, description="not used")
    metadata: dict[str, Any] | None = Field(None, description="not used")
    store: bool | None = Field(None, description="not used")
    service_tier: StrictStr | None = Field(None, description="not used")
    safety_identifier: StrictStr | None = Field(None, description="not used")
    prompt_cache_key: StrictStr | None = Field(None, description="not used: all prompts share one cache")

    def _params(self, max_tokens: int | None, **more: Any) -> SamplingParams:
        given = {name: value for name in _SAME if (value := getattr(self, name)) is not None}
        if self.stop is not None:
            given["stop"] = self.stop
        if given.get("seed", -1) != -1:  # -1 means none, and otherwise clients may send any 64-bit integer
            given["seed"] %= 2**63
        return SamplingParams(max_tokens=max_tokens, **given, **more)

    def check(self) -> None:
        """Raise RequestError for fields that do not go together."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is for streams", "stream_options", 'give "stream": true')


class CompletionRequest(_Generation):
    """POST /v1/completions."""

    prompt: StrictStr | Texts | Ids | Annotated[list[Ids], _First()] = Field(
        description="a text, token ids, or a list of either"
    )
    logprobs: int | None = Field(None, ge=0, le=MOST_ALTERNATIVES)
    echo: bool | None = Field(None, description="give the prompt too; with max_tokens 0, nothing else")
    best_of: int | None = Field(None, ge=1, description="must be n")
    suffix: None = None

    def prompts(self) -> list[Prompt]:
        """One or more, each a text or token ids."""
        prompts = separate(self.prompt)
        if not prompts or len(prompts) > MOST_PROMPTS:
            raise RequestError(f"{len(prompts)} prompts: there must be 1 to {MOST_PROMPTS}", "prompt")
        return prompts

    def params(self) -> SamplingParams:
        """As the engine takes them, but for `max_tokens` that are not said: MOST_UNASKED, where the prompts leave room.
        Raises RequestError."""
        self.check()
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError("best_of other than n is not supported", "best_of", "leave it out")
        if self.max_tokens == 0 and not self.echo:
            raise RequestError("max_tokens 0 is for echo: nothing would be generated", "max_tokens")
        prompt_logprobs = self.logprobs if self.echo else None
        return self._params(self.max_tokens, logprobs=self.logprobs, prompt_logprobs=prompt_logprobs)


class TextPart(_Body):
    """A part of a message."""

    type: Literal["text"]
    text: StrictStr


_INSTEAD: dict[str, Any] = {
    "tool_calls": {"type": "array", "minItems": 1},
    "function_call": {"type": "object", "minProperties": 1},
    "refusal": {"type": "string", "minLength": 1},
}
"""One of these is there in an assistant's message without content: SAID_INSTEAD."""
_SAID: list[Any] = [
    {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}},
    *({"required": [n], "properties": {"role": {"const": "assistant"}, n: kind}} for n, kind in _INSTEAD.items()),
]


class ChatMessage(BaseModel):
    """A turn of a conversation; what else it holds is for the template."""

    model_config = ConfigDict(extra="allow", strict=True, json_schema_extra={"anyOf": _SAID})
    role: Role
    content: StrictStr | Annotated[list[TextPart], _First()] | None = Field(
        None, description="must be there, unless an assistant called tools (tool_calls, function_call) or refused"
    )


class ResponseFormat(_Body):
    """Only plain text."""

    type: Literal["text"]


class ChatRequest(_Generation):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], _First()] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_ALTERNATIVES)
    response_format: ResponseFormat | None = None
    tools: list[dict[str, Any]] | None = Field(None, max_length=0, description="not supported")
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = Field(None, description="not used: there are no tools")
    modalities: list[Literal["text"]] | None = Field(None, min_length=1, max_length=1)
    verbosity: Literal["medium"] | None = Field(None, description="a model writes as it does")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="variables of the chat template")

    def params(self) -> SamplingParams:
        """As the engine takes them. Raises RequestError."""
        self.check()
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs", "top_logprobs", 'give "logprobs": true')
        asked = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        if self.max_tokens not in (None, asked):
            problem = f"max_tokens is {self.max_tokens}, and max_completion_tokens is {asked}"
            raise RequestError(problem, "max_tokens", "give one of them: they are the same")
        if asked == 0:
            raise RequestError("max_tokens is 0: it must be at least 1", "max_tokens")
        return self._params(asked, logprobs=(self.top_logprobs or 0) if self.logprobs else None)


def refusal(error: ValidationError, body: type[BaseModel]) -> RequestError:
    """The first thing that is wrong with a body, as one of our errors."""
    if error.error_count() > MOST_COMPLAINTS:
        return RequestError(f"{error.error_count()} things are wrong with the body", hint="try a smaller one")
    closest = _closest(error.errors(include_url=False, include_context=False, include_input=False))
    first = closest[0]
    path = [str(part) for part in first["loc"]]
    if not path:
        name = next(name for name in ("messages", "prompt") if name in body.model_fields)
        return RequestError("the body is no JSON object", hint=f'such as {{"{name}": ...}}')
    known = body.model_fields
    param = ".".join(path[: _variant(first)])
    place = ".".join(part for part in path if part == path[0] or not _is_variant(part))
    if first["type"] == "extra_forbidden" and len(path) == 1:
        return RequestError(f"there is no field '{path[0]}'", path[0], did_you_mean(path[0], known))
    if first["type"] == "missing":
        return RequestError(f"the field '{place}' is missing", param)
    if first["type"] == "none_required":
        return RequestError(f"{place} is not supported", param, "leave it out")
    if path == ["tools"] and first["type"] == "too_long":
        return RequestError("tools are not supported", param, "leave them out")
    return RequestError(f"{place}: {_complaint([each['msg'] for each in closest])}", param or None)


def _complaint(messages: Sequence[str]) -> str:
    """The first message; where all say which type should be there, their types."""
    types = list(dict.fromkeys(message.removeprefix(_VALID) for message in messages))
    if len(types) == 1 or not all(message.startswith(_VALID) for message in messages):
        return messages[0][:1].lower() + messages[0][1:]
    return f"{_VALID[:1].lower()}{_VALID[1:]}{', '.join(types[:-1])} or {types[-1]}"


def _closest(errors: Sequence[Any]) -> list[Any]:
    """The first error. Where a field may be of several types, those of the types which fit furthest."""
    field = errors[0]["loc"][: _variant(errors[0])]
    firsts: dict[Any, Any] = {}
    for error in errors:
        if error["loc"][: _variant(error)] == field:
            firsts.setdefault(error["loc"][: _variant(error) + 1], error)

    def reached(error: Any) -> tuple[bool, tuple[int, ...]]:
        rest = error["loc"][_variant(error) + 1 :]
        return bool(rest), tuple(part for part in rest if isinstance(part, int))

    furthest = max(map(reached, firsts.values()))
    return [error for error in firsts.values() if reached(error) == furthest]


def _variant(error: Any) -> int:
    """Where in the place of an error a type is named, or its end; before it is the field."""
    return next((at for at, part in enumerate(error["loc"]) if at and _is_variant(str(part))), len(error["loc"]))


def _is_variant(part: str) -> bool:
    """Whether this names one of several types that were tried, not a place in the body."""
    return part in ("str", "int", "constrained-str", "constrained-int") or part.startswith(("list[", "function-"))


def openapi(title: str, version: str, bodies: Mapping[str, type[BaseModel]], gets: Sequence[str]) -> dict[str, Any]:
    """The OpenAPI description of paths with POST bodies, and of others."""
    schemas: dict[str, Any] = {"Error": _ERROR}
    paths: dict[str, Any] = {}
    failed = {
        "description": "error",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    codes = ("400", "401", "404", "413", "429", "500", "503")
    for path, body in bodies.items():
        schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        schemas[body.__name__] = schema
        answers: dict[str, Any] = {
            "200": {
                "description": "the result, or events of a stream",
                "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}},
            }
        }
        reference = {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}
        paths[path] = {
            "post": {
                "summary": (body.__doc__ or "").strip(),
                "requestBody": {"required": True, "content": {"application/json": reference}},
                "responses": answers | dict.fromkeys(codes, failed),
            }
        }
    for path in gets:
        kind = "text/plain" if path == "/metrics" else "application/json"
        responses: dict[str, Any] = {"200": {"description": "ok", "content": {kind: {}}}}
        if "health" in path:
            responses["503"] = {"description": "not ready", "content": {kind: {}}}
        elif path.startswith("/v1"):
            responses["401"] = failed
        described: dict[str, Any] = {"responses": responses}
        if "{name}" in path:
            responses["404"] = failed
            schema = {"type": "string", "minLength": 1}
            described["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": schema}]
        paths[path] = {"get": described}
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "paths": paths,
        "components": {"schemas": schemas},
    }


_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "integer", "null"]},
            },
        }
    },
}
