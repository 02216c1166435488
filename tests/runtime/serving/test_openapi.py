"""The server against its own description: whatever follows or breaks it, nothing is an error of the server."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from pydantic import BaseModel, ValidationError

from mgraph.runtime.serving.prompts import SAID_INSTEAD
from mgraph.runtime.serving.protocol import ChatRequest, CompletionRequest, openapi, refusal
from tests.runtime.serving.fake_server import idle, running, serving

BODIES: Any = {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest}
DESCRIPTION = openapi("mgraph", "0", BODIES, ("/v1/models", "/v1/models/{name}", "/health", "/v1/health", "/metrics"))
SCHEMA = schemathesis.openapi.from_dict(DESCRIPTION)
ALLOWED = {200, 400, 404, 405, 413, 429}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    made = serving()
    with running(made) as found:
        yield found
        idle(made, 60)


def test_it_is_what_the_server_says(address: str) -> None:
    connection = http.client.HTTPConnection(urlsplit(address).netloc)
    connection.request("GET", "/openapi.json")
    assert json.loads(connection.getresponse().read())["paths"] == DESCRIPTION["paths"]


@pytest.mark.parametrize("path", sorted(BODIES))
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_bodies(address: str, path: str, mode: str) -> None:
    """Bodies that the description allows, and mutations of them; `-m full` tries more."""
    run_bodies(address, path, mode, 12)


@pytest.mark.full
@pytest.mark.parametrize("path", sorted(BODIES))
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_many_bodies(address: str, path: str, mode: str) -> None:
    run_bodies(address, path, mode, 500)


def run_bodies(address: str, path: str, mode: str, count: int) -> None:
    modes = schemathesis.GenerationMode
    operation = SCHEMA[path]["POST"]
    strategy = operation.as_strategy(generation_mode=modes.POSITIVE if mode == "positive" else modes.NEGATIVE)
    seen = set()

    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(case=strategy)
    def attempt(case: Any) -> None:
        answer = case.call(base_url=address, timeout=30)
        seen.add(answer.status_code)
        assert answer.status_code in ALLOWED, answer.text
        if answer.status_code != 200:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    attempt()
    assert seen & {200, 400}


@pytest.mark.parametrize(
    ("message", "right"),
    [
        ({"role": "user", "content": "a"}, True),
        ({"role": "tool", "content": [{"type": "text", "text": "a"}], "tool_call_id": "1"}, True),
        ({"role": "assistant", "content": None, "tool_calls": [{}]}, True),
        ({"role": "assistant", "refusal": "no"}, True),
        ({"role": "assistant", "function_call": {"name": "f"}}, True),
        ({"role": "user"}, False),
        ({"role": "user", "content": None, "tool_calls": [{}]}, False),
        ({"role": "assistant"}, False),
        ({"role": "assistant", "tool_calls": []}, False),
        ({"content": "a"}, False),
    ],
)
def test_messages_are_described_as_they_are_taken(address: str, message: dict[str, Any], right: bool) -> None:
    body = {"messages": [message], "max_tokens": 1}
    schema = {**DESCRIPTION, "$ref": "#/components/schemas/ChatRequest"}
    assert jsonschema_rs.is_valid(schema, body) is right
    connection = http.client.HTTPConnection(urlsplit(address).netloc)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    assert connection.getresponse().status == (200 if right else 400)


def test_instead_of_content_is_the_same_everywhere() -> None:
    branches = DESCRIPTION["components"]["schemas"]["ChatMessage"]["anyOf"]
    assert tuple(name for branch in branches[1:] for name in branch["required"]) == tuple(SAID_INSTEAD)
    assert (
        DESCRIPTION["components"]["schemas"]["CompletionRequest"]["properties"]["best_of"]["anyOf"][0]["minimum"] == 1
    )


@pytest.mark.parametrize(
    ("kind", "body", "said"),
    [
        (CompletionRequest, [], 'the body is no JSON object\n  try: such as {"prompt": ...}'),
        (ChatRequest, "hello", 'the body is no JSON object\n  try: such as {"messages": ...}'),
        (CompletionRequest, {"prompt": "a", "suffix": "b"}, "suffix is not supported"),
    ],
)
def test_what_is_wrong_is_said_in_words(kind: type[BaseModel], body: Any, said: str) -> None:
    with pytest.raises(ValidationError) as raised:
        kind.model_validate_json(json.dumps(body))
    assert said in str(refusal(raised.value, kind))


@pytest.mark.parametrize(
    ("body", "said", "most"),
    [
        ({"prompt": [0] * 5000 + [0.5]}, "prompt.5000: input should be a valid integer", 4),
        ({"prompt": ["a"] * 5000 + [3]}, "prompt.5000: input should be a valid string", 4),
        ({"prompt": [[0.5]] * 5000}, "prompt.0.0: input should be a valid integer", 4),
        ({"prompt": "a", "stop": [1] * 5000}, "stop.0: input should be a valid string", 2),
        ({"prompt": "a", "logit_bias": {str(n): "x" for n in range(5000)}}, "5000 things are wrong", 5000),
        ({"messages": [{}] * 5000}, "the field 'messages.0.role' is missing", 2),
    ],
)
def test_of_much_that_is_wrong_little_is_told(body: dict[str, Any], said: str, most: int) -> None:
    """The time of an answer is not that of thousands of complaints about one body."""
    kind = ChatRequest if "messages" in body else CompletionRequest
    with pytest.raises(ValidationError) as raised:
        kind.model_validate_json(json.dumps(body))
    assert raised.value.error_count() <= most
    assert said in str(refusal(raised.value, kind))
