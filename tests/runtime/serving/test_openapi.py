"""The server against its own description: whatever follows or breaks it, nothing is an error of the server."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

from mgraph.runtime.serving.protocol import ChatRequest, CompletionRequest, openapi
from tests.runtime.serving.fake_server import idle, running, serving

BODIES: Any = {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest}
DESCRIPTION = openapi("mgraph", "0", BODIES, ("/v1/models", "/health", "/v1/health", "/metrics"))
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
