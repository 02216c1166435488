"""The server with the client that people use, and without it: what is answered, and with which code."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from mgraph.runtime.serving import server
from mgraph.runtime.serving.parameters import SamplingParams
from mgraph.runtime.serving.server import Serving
from mgraph.runtime.tokenizer import ByteTokenizer
from tests.runtime.serving.fake_server import idle, running, serving
from tests.runtime.serving.fake_stepper import FakeStepper, alone, log_softmax

GREEDY: dict[str, Any] = {"model": "fake", "temperature": 0, "max_tokens": 12}
PARAMS = SamplingParams(temperature=0)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Serving, str]]:
    made = serving()
    with running(made) as address:
        yield made, address


@pytest.fixture(scope="module")
def client(served: tuple[Serving, str]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served[1]}/v1", api_key="any", max_retries=0) as made:
        yield made


def said(served: tuple[Serving, str], prompt: bytes, count: int = 12) -> tuple[str, list[float]]:
    """The text that a prompt gives alone, and its log-probabilities."""
    stepper = served[0].engine.stepper
    assert isinstance(stepper, FakeStepper)
    tokens, scores = alone(stepper.logits, list(prompt), PARAMS, count, ends=[0])
    text = bytes(token for token in tokens if token != 0).decode("utf-8", errors="replace")
    return text, scores


def post(address: str, path: str, body: bytes | Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    """The code and the JSON of an answer."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return exchange(address, "POST", path, raw, headers)


def exchange(
    address: str, method: str, path: str, raw: bytes | None = None, headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=20)
    try:
        connection.request(method, path, raw, {"Content-Type": "application/json", **(headers or {})})
        answer = connection.getresponse()
        text = answer.read().decode()
        return answer.status, json.loads(text) if "json" in (answer.getheader("Content-Type") or "") else text
    finally:
        connection.close()


def test_completions(served: tuple[Serving, str], client: openai.OpenAI) -> None:
    answer = client.completions.create(prompt=["one", "two"], logprobs=2, **GREEDY)
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-") and answer.model == "fake"
    assert abs(answer.created - time.time()) < 60
    for index, (choice, prompt) in enumerate(zip(answer.choices, (b"one", b"two"), strict=True)):
        text, scores = said(served, prompt)
        assert (choice.index, choice.text) == (index, text)
        assert choice.finish_reason in ("length", "stop")
        lists = choice.logprobs
        assert lists is not None and lists.token_logprobs == pytest.approx(scores, abs=1e-4)
        assert len(lists.tokens or []) == len(lists.text_offset or []) == len(lists.top_logprobs or []) == len(scores)
        assert all(0 <= at <= len(text) for at in lists.text_offset or [-1])
        assert all(2 <= len(top) <= 3 for top in lists.top_logprobs or [])
    usage = answer.usage
    assert usage is not None and usage.prompt_tokens == 6
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    by_ids = client.completions.create(prompt=[111, 110, 101], **GREEDY)
    assert by_ids.choices[0].text == answer.choices[0].text


def test_a_stream_of_completions_is_the_same_text(served: tuple[Serving, str], client: openai.OpenAI) -> None:
    whole = client.completions.create(prompt=["one", "two"], **GREEDY)
    options: Any = {"include_usage": True}
    texts, ends, usage = {0: "", 1: ""}, {}, None
    for chunk in client.completions.create(prompt=["one", "two"], stream=True, stream_options=options, **GREEDY):
        for choice in chunk.choices:
            assert choice.index not in ends
            texts[choice.index] += choice.text
            if choice.finish_reason is not None:
                ends[choice.index] = choice.finish_reason
        assert "usage" in chunk.model_fields_set
        usage = chunk.usage or usage
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert ends == {choice.index: choice.finish_reason for choice in whole.choices}
    assert usage is not None and whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_chat(served: tuple[Serving, str], client: openai.OpenAI) -> None:
    messages: Any = [{"role": "system", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    prompt = b"system: x\nuser: hi\nassistant: "
    answer = client.chat.completions.create(messages=messages, logprobs=True, top_logprobs=2, **GREEDY)
    text, scores = said(served, prompt)
    choice = answer.choices[0]
    assert (answer.object, choice.message.role, choice.message.content) == ("chat.completion", "assistant", text)
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert [item.logprob for item in choice.logprobs.content] == pytest.approx(scores, abs=1e-4)
    assert all(len(item.top_logprobs) == 2 and item.bytes is not None for item in choice.logprobs.content)
    raw = bytes(byte for item in choice.logprobs.content for byte in item.bytes or [] if byte)
    assert raw.decode("utf-8", errors="replace") == text
    pieces, roles, ends = "", [], []
    for chunk in client.chat.completions.create(messages=messages, stream=True, **GREEDY):
        assert chunk.object == "chat.completion.chunk"
        pieces += chunk.choices[0].delta.content or ""
        roles += [chunk.choices[0].delta.role] if chunk.choices[0].delta.role else []
        ends += [chunk.choices[0].finish_reason] if chunk.choices[0].finish_reason else []
    assert (pieces, roles, ends) == (text, ["assistant"], [choice.finish_reason])


@pytest.mark.parametrize("more", [{}, {"content": None}])
def test_an_assistant_that_called_tools_may_say_nothing(served: tuple[Serving, str], more: dict[str, Any]) -> None:
    called = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function"}], **more}
    messages = [{"role": "user", "content": "x"}, called, {"role": "tool", "content": "4", "tool_call_id": "1"}]
    code, answer = post(served[1], "/v1/chat/completions", {"messages": messages, **GREEDY})
    text, _ = said(served, b"user: x\nassistant: \ntool: 4\nassistant: ")
    assert (code, answer["choices"][0]["message"]["content"]) == (200, text)


def test_several_choices_seeds_and_stops(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "fake", "prompt": "some prompt that is longer", "max_tokens": 20, "seed": 5}
    first = client.completions.create(n=3, **asked)
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len({choice.text for choice in first.choices}) == 3
    assert [c.text for c in client.completions.create(n=3, **asked).choices] == [c.text for c in first.choices]
    text = first.choices[0].text
    stopped = client.completions.create(stop=[text[4:6]], **asked).choices[0]
    assert stopped.text == text[: text.index(text[4:6])] and stopped.finish_reason == "stop"
    assert stopped.model_extra is not None and stopped.model_extra["stop_reason"] == text[4:6]


def test_a_seed_of_minus_one_is_none(client: openai.OpenAI) -> None:
    def texts(seed: int) -> set[str]:
        asked: dict[str, Any] = {"model": "fake", "prompt": "some prompt", "max_tokens": 20, "temperature": 2}
        return {client.completions.create(seed=seed, **asked).choices[0].text for _ in range(3)}

    assert len(texts(-1)) == 3
    assert len(texts(-2)) == len(texts(2**63 - 1)) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("count", [0, 3])
def test_echo_gives_the_prompt_and_its_scores(
    served: tuple[Serving, str], client: openai.OpenAI, stream: bool, count: int
) -> None:
    asked: dict[str, Any] = {
        "prompt": ["a prompt", "b"],
        "echo": True,
        "logprobs": 0,
        "model": "fake",
        "n": 2,
        "seed": 1,
    }
    texts: dict[int, str] = {}
    tokens: dict[int, list[str]] = {}
    scores: dict[int, list[float | None]] = {}
    offsets: dict[int, list[int]] = {}
    made: Any = client.completions.create(max_tokens=count, stream=stream, **asked)
    for chunk in made if stream else [made]:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.logprobs is not None:
                tokens.setdefault(choice.index, []).extend(choice.logprobs.tokens)
                scores.setdefault(choice.index, []).extend(choice.logprobs.token_logprobs)
                offsets.setdefault(choice.index, []).extend(choice.logprobs.text_offset)
    assert sorted(texts) == [0, 1, 2, 3]
    stepper = served[0].engine.stepper
    assert isinstance(stepper, FakeStepper)
    for index, text in texts.items():
        prompt = list(("a prompt", "b")[index // 2].encode())
        assert (
            text.startswith(bytes(prompt).decode()) and "".join(tokens[index][: len(prompt)]) == bytes(prompt).decode()
        )
        dense = [log_softmax(stepper.logits(prompt[:at]))[prompt[at]] for at in range(1, len(prompt))]
        assert scores[index][0] is None and scores[index][1 : len(prompt)] == pytest.approx(dense, abs=1e-4)
        assert len(scores[index]) <= len(prompt) + count and (count or len(scores[index]) == len(prompt))
        assert offsets[index][: len(prompt)] == [[0, 1, 2, 3, 4, 5, 6, 7], [0]][index // 2]


def test_models_health_and_description(served: tuple[Serving, str], client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").id == "fake"
    with pytest.raises(openai.NotFoundError, match="'other' does not exist"):
        client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError, match="'other' does not exist") as caught:
        client.completions.create(prompt="x", model="other")
    assert caught.value.code == "model_not_found" and caught.value.param == "model"
    for path in ("/health", "/v1/health"):
        assert exchange(served[1], "GET", path) == (200, {"status": "ok", "ready": True, "service": "mgraph"})
    code, page = exchange(served[1], "GET", "/")
    assert code == 200 and '"fake"' in page
    assert exchange(served[1], "GET", "/openapi.json")[1]["openapi"] == "3.1.0"


GOOD: dict[str, Any] = {"prompt": "x"}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
WRONG: list[tuple[str, Any, int, str | None]] = [
    ("completions", b"", 400, None),
    ("completions", b"{", 400, None),
    ("completions", b"[]", 400, None),
    ("completions", b'"x"', 400, None),
    ("completions", b"null", 400, None),
    ("completions", b"\xff\xfe", 400, None),
    ("completions", b'{"prompt": "\\ud800"}', 400, None),
    ("completions", b'{"prompt": "x", "temperature": NaN}', 400, None),
    ("completions", b'{"prompt": "x", "temperature": Infinity}', 400, None),
    ("completions", b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", 400, None),
    ("completions", b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, None),
    ("completions", {}, 400, "prompt"),
    ("completions", {"prompt": ""}, 400, "prompt"),
    ("completions", {"prompt": []}, 400, "prompt"),
    ("completions", {"prompt": [[]]}, 400, "prompt"),
    ("completions", {"prompt": ["x", 1]}, 400, "prompt"),
    ("completions", {"prompt": [1, "x"]}, 400, "prompt"),
    ("completions", {"prompt": [1.5]}, 400, "prompt"),
    ("completions", {"prompt": [True]}, 400, "prompt"),
    ("completions", {"prompt": {"a": 1}}, 400, "prompt"),
    ("completions", {"prompt": [256]}, 400, "prompt"),
    ("completions", {"prompt": [-1]}, 400, "prompt"),
    ("completions", {"prompt": [2**70]}, 400, "prompt"),
    ("completions", {"prompt": [-5], "echo": True, "max_tokens": 0}, 400, "prompt"),
    ("completions", {"prompt": [[65, -1], [66]], "echo": True, "stream": True}, 400, "prompt"),
    ("completions", {"prompt": "x" * 256}, 400, "prompt"),
    ("completions", {"prompt": ["x"] * 3000}, 400, "prompt"),
    ("completions", {**GOOD, "max_tokens": 300}, 400, "max_tokens"),
    ("completions", {**GOOD, "max_tokens": -1}, 400, "max_tokens"),
    ("completions", {**GOOD, "max_tokens": 0}, 400, "max_tokens"),
    ("completions", {**GOOD, "max_tokens": "5"}, 400, "max_tokens"),
    ("completions", {**GOOD, "max_tokens": 1.5}, 400, "max_tokens"),
    ("completions", {**GOOD, "temperature": -1}, 400, "temperature"),
    ("completions", {**GOOD, "temperature": 2.1}, 400, "temperature"),
    ("completions", {**GOOD, "temperature": "hot"}, 400, "temperature"),
    ("completions", {**GOOD, "temperature": True}, 400, "temperature"),
    ("completions", {**GOOD, "top_p": 0}, 400, "top_p"),
    ("completions", {**GOOD, "top_p": 1.5}, 400, "top_p"),
    ("completions", {**GOOD, "top_k": -5}, 400, "top_k"),
    ("completions", {**GOOD, "min_p": 7}, 400, "min_p"),
    ("completions", {**GOOD, "n": 0}, 400, "n"),
    ("completions", {**GOOD, "n": 10**6}, 400, "n"),
    ("completions", {"prompt": ["x"] * 20, "n": 100}, 400, "n"),
    ("completions", {**GOOD, "n": 2, "temperature": 0}, 400, "n"),
    ("completions", {**GOOD, "best_of": 3}, 400, "best_of"),
    ("completions", {**GOOD, "suffix": "x"}, 400, "suffix"),
    ("completions", {**GOOD, "stop": ""}, 400, "stop"),
    ("completions", {**GOOD, "stop": [1]}, 400, "stop"),
    ("completions", {**GOOD, "logprobs": 21}, 400, "logprobs"),
    ("completions", {**GOOD, "logprobs": True}, 400, "logprobs"),
    ("completions", {**GOOD, "logit_bias": {"x": 1}}, 400, "logit_bias"),
    ("completions", {**GOOD, "logit_bias": {"999": 1}}, 400, "logit_bias"),
    ("completions", {**GOOD, "presence_penalty": 3}, 400, "presence_penalty"),
    ("completions", {**GOOD, "seed": "x"}, 400, "seed"),
    ("completions", {**GOOD, "stream": "yes"}, 400, "stream"),
    ("completions", {**GOOD, "stream_options": {"include_usage": True}}, 400, "stream_options"),
    ("completions", {**GOOD, "temprature": 1}, 400, "temprature"),
    ("completions", {**GOOD, "allowed_token_ids": [300]}, 400, "allowed_token_ids"),
    ("completions", {**GOOD, "stop_token_ids": [300]}, 400, "stop_token_ids"),
    ("completions", {**GOOD, "min_tokens": 17}, 400, "min_tokens"),
    ("completions", {**GOOD, "model": 3}, 400, "model"),
    ("completions", {**GOOD, "model": "gpt"}, 404, "model"),
    ("chat/completions", {}, 400, "messages"),
    ("chat/completions", {"messages": []}, 400, "messages"),
    ("chat/completions", {"messages": "hi"}, 400, "messages"),
    ("chat/completions", {"messages": [{"content": "x"}]}, 400, "messages.0.role"),
    ("chat/completions", {"messages": [{"role": "king", "content": "x"}]}, 400, "messages.0.role"),
    ("chat/completions", {"messages": [{"role": "user", "content": 3}]}, 400, "messages.0.content"),
    ("chat/completions", {"messages": [{"role": "user"}]}, 400, "messages.0.content"),
    (
        "chat/completions",
        {"messages": [*CHAT["messages"], {"role": "tool", "content": None}]},
        400,
        "messages.1.content",
    ),
    ("chat/completions", {"messages": [{"role": "assistant"}]}, 400, "messages.0.content"),
    ("chat/completions", {"messages": [{"role": "user", "tool_calls": [{}]}]}, 400, "messages.0.content"),
    ("chat/completions", {"messages": [{"role": "user", "content": "x" * 300}]}, 400, "messages"),
    ("chat/completions", {**CHAT, "top_logprobs": 2}, 400, "top_logprobs"),
    ("chat/completions", {**CHAT, "logprobs": 2}, 400, "logprobs"),
    ("chat/completions", {**CHAT, "tools": [{"type": "function"}]}, 400, "tools"),
    ("chat/completions", {**CHAT, "response_format": {"type": "json_object"}}, 400, "response_format.type"),
    ("chat/completions", {**CHAT, "max_completion_tokens": 0}, 400, "max_completion_tokens"),
    ("chat/completions", {**CHAT, "max_completion_tokens": 3, "max_tokens": 5}, 400, "max_tokens"),
    ("chat/completions", {**CHAT, "modalities": ["text", "audio"]}, 400, "modalities"),
    ("chat/completions", {**CHAT, "modalities": ["audio"]}, 400, "modalities.0"),
    ("chat/completions", {**CHAT, "verbosity": "low"}, 400, "verbosity"),
    ("chat/completions", {**CHAT, "chat_template_kwargs": [1]}, 400, "chat_template_kwargs"),
    ("chat/completions", {**CHAT, "chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs"),
    (
        "chat/completions",
        {**CHAT, "stream": True, "stream_options": {"include_obfuscation": True}},
        400,
        "stream_options.include_obfuscation",
    ),
    ("nothing", {}, 404, None),
]


def test_fields_that_change_nothing(served: tuple[Serving, str], client: openai.OpenAI) -> None:
    """Labels, and values that say what is done anyway."""
    messages: Any = [{"role": "user", "content": "hi"}]
    options: Any = {"include_usage": True, "include_obfuscation": False}
    neutral: Any = {
        "safety_identifier": "person 5",
        "prompt_cache_key": "group",
        "parallel_tool_calls": True,
        "modalities": ["text"],
        "verbosity": "medium",
        "logprobs": False,
        "top_logprobs": 0,
        "extra_body": {"chat_template_kwargs": {"enable_thinking": False}},
    }
    plain = client.chat.completions.create(messages=messages, **GREEDY).choices[0]
    assert client.chat.completions.create(messages=messages, **neutral, **GREEDY).choices[0] == plain
    stream = client.chat.completions.create(
        messages=messages, stream=True, stream_options=options, **{**neutral, **GREEDY}
    )
    assert "".join(c.choices[0].delta.content or "" for c in stream if c.choices) == plain.message.content


@pytest.mark.parametrize(("path", "body", "code", "param"), WRONG)
def test_wrong_requests(served: tuple[Serving, str], path: str, body: Any, code: int, param: str | None) -> None:
    found, answer = post(served[1], f"/v1/{path}", body)
    assert found == code, answer
    assert set(answer) == {"error"} and set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["type"] == "invalid_request_error"
    if code == 400:
        assert answer["error"]["param"] == param, answer
    assert len(answer["error"]["message"]) < 500
    assert served[0].background.active == 0


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("chat/completions", [{"type": "image_url", "image_url": {"url": "x"}}], "0.type: input should be 'text'"),
        ("chat/completions", [{"type": "text", "text": "a"}, {"type": "text"}], "1.text' is missing"),
        ("completions", [1, "a"], "prompt.1: input should be a valid integer"),
        ("completions", ["a", 5], "prompt.1: input should be a valid string"),
        ("completions", [[1], ["a"]], "prompt.1.0: input should be a valid integer"),
        ("completions", [1.5], "prompt.0: input should be a valid string, integer or list"),
        ("completions", 1.5, "prompt: input should be a valid string or list"),
        ("chat/completions", 5, "messages.0.content: input should be a valid string or list"),
    ],
)
def test_of_several_types_the_closest_says_what_is_wrong(
    served: tuple[Serving, str], path: str, body: Any, says: str
) -> None:
    chat = {"messages": [{"role": "user", "content": body}]}
    code, answer = post(served[1], f"/v1/{path}", chat if path.startswith("chat") else {"prompt": body})
    assert code == 400 and says in answer["error"]["message"]
    assert answer["error"]["param"] == ("messages.0.content" if path.startswith("chat") else "prompt")


def test_tools_are_said_not_to_be_supported(served: tuple[Serving, str]) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function"}]}
    code, answer = post(served[1], "/v1/chat/completions", body)
    assert (code, answer["error"]["param"]) == (400, "tools")
    assert answer["error"]["message"] == "tools are not supported (leave them out)"


def test_half_of_a_surrogate_pair_is_said_to_be_no_text(served: tuple[Serving, str]) -> None:
    """JSON may have it."""
    code, answer = post(served[1], "/v1/completions", {"prompt": "a\ud800"})
    assert code == 400
    said = answer["error"]["message"]
    assert r"half of a surrogate pair, '\ud800', which is no text" in said and "JSON" not in said


def test_methods_and_request_ids(served: tuple[Serving, str]) -> None:
    assert exchange(served[1], "GET", "/v1/completions")[0] == 405
    assert exchange(served[1], "DELETE", "/v1/models")[0] == 405
    connection = http.client.HTTPConnection(urlsplit(served[1]).netloc)
    for given in ("abc-123", "x" * 200):
        connection.request("GET", "/health", headers={"X-Request-Id": given})
        answer = connection.getresponse()
        answer.read()
        number = answer.getheader("X-Request-Id") or ""
        assert number == given if len(given) < 100 else len(number) == 32
    connection.close()


def test_limits_and_key() -> None:
    small = serving(max_body=1000, max_queue=2, api_key="secret")
    with running(small) as address:
        key = {"Authorization": "Bearer secret"}
        assert post(address, "/v1/completions", GOOD)[0] == 401
        assert post(address, "/v1/completions", GOOD, {"Authorization": "Bearer wrong"})[0] == 401
        assert exchange(address, "GET", "/v1/models")[0] == 401
        assert exchange(address, "GET", "/v1/health")[0] == exchange(address, "GET", "/metrics")[0] == 200
        assert post(address, "/v1/completions", GOOD, key)[0] == 200
        for body, field in (({"prompt": ["a", "b", "c"]}, "prompt"), ({"prompt": "a", "n": 3}, "n")):
            code, answer = post(address, "/v1/completions", body, key)
            assert (code, answer["error"]["param"]) == (400, field)
            assert "3 sequences are asked for, and at most 2 are allowed" in answer["error"]["message"]
        code, answer = post(address, "/v1/completions", {"prompt": "x" * 2000}, key)
        assert (code, answer["error"]["code"]) == (413, "too_large")
        with openai.OpenAI(base_url=f"{address}/v1", api_key="secret", max_retries=0) as client:
            streams = [client.completions.create(prompt="x", model="fake", max_tokens=200, stream=True) for _ in "ab"]
            small.engine.stepper.seconds = 0.01  # type: ignore[attr-defined]
            with pytest.raises(openai.RateLimitError, match="at most 2 are allowed"):
                client.completions.create(prompt="x", model="fake")
            for stream in streams:
                stream.close()
        with (
            openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.models.list()


def test_a_key_of_any_signs() -> None:
    """A header's bytes are those of the key."""
    with running(serving(api_key="sésame")) as address:
        assert (
            post(address, "/v1/completions", GOOD, {"Authorization": "Bearer sésame".encode().decode("latin-1")})[0]
            == 200
        )
        assert post(address, "/v1/completions", GOOD, {"Authorization": "Bearer sesame"})[0] == 401


def test_a_completion_that_says_no_length_has_what_fits() -> None:
    with running(serving()) as address:
        for length, fit in ((10, 16), (250, 6), (255, 1)):
            code, answer = post(address, "/v1/completions", {"prompt": [7] * length, "ignore_eos": True})
            assert (code, answer["usage"]["completion_tokens"]) == (200, fit)
        assert post(address, "/v1/completions", {"prompt": [7] * 250, "max_tokens": 16})[0] == 400


def test_without_a_chat_template(served: tuple[Serving, str]) -> None:
    with running(serving(template=False)) as address:
        code, answer = post(address, "/v1/chat/completions", CHAT)
        assert code == 400 and "no chat template" in answer["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_request(stream: bool) -> None:
    slow = serving(FakeStepper(vocab_size=256, num_blocks=60, max_length=256, seconds=0.01))
    with running(slow) as address:
        host, port = urlsplit(address).netloc.split(":")
        body = json.dumps({"prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": stream}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        for _ in range(3):
            connection = socket.create_connection((host, int(port)))
            connection.sendall(head + body)
            if stream:
                assert connection.recv(10)
            else:
                while not slow.background.active:
                    time.sleep(0.005)
            connection.close()
        started = time.monotonic()
        idle(slow)
        assert time.monotonic() - started < 1, "200 steps of 10 ms were not waited for"


class Slow(ByteTokenizer):
    """Takes a second for a long text, of which it does not know that it is too long."""

    longest_token = None

    def encode(self, text: str) -> torch.Tensor:
        time.sleep(len(text) > 50_000)
        return super().encode(text)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": "x" * 60_000}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * 60_000}]}),
    ],
)
def test_a_long_text_keeps_nobody_waiting(path: str, body: Any) -> None:
    served = serving()
    served.engine.tokenizer = Slow()
    with running(served) as address, ThreadPoolExecutor(1) as thread:
        long = thread.submit(post, address, f"/v1/{path}", body)
        time.sleep(0.2)
        started = time.monotonic()
        assert exchange(address, "GET", "/health")[0] == 200 and time.monotonic() - started < 0.5
        assert not long.done() and long.result()[0] == 400


def test_a_long_body_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither while it is read, nor while it is checked."""
    read = server._json

    def slowly(raw: bytes) -> Any:
        time.sleep(len(raw) > 50_000)
        return read(raw)

    monkeypatch.setattr(server, "_json", slowly)
    with running(serving()) as address, ThreadPoolExecutor(1) as thread:
        long = thread.submit(post, address, "/v1/completions", {"prompt": [1] * 60_000})
        time.sleep(0.2)
        started = time.monotonic()
        assert exchange(address, "GET", "/health")[0] == 200 and time.monotonic() - started < 0.5
        assert not long.done() and long.result()[0] == 400


@pytest.mark.parametrize(("text", "code"), [(r"\ud83d\ude00", 200), (r"\ud83d", 400), (r"\\ud83d", 200)])
def test_halves_of_surrogate_pairs_are_no_text(text: str, code: int) -> None:
    raw = f'{{"prompt": "a", "max_tokens": 1, "user": "{text}"}}'.encode()
    with running(serving()) as address:
        assert exchange(address, "POST", "/v1/completions", raw)[0] == code


def test_a_text_that_can_only_be_too_long_is_not_made_tokens_of() -> None:
    """Neither are conversations; of what has no bound on its tokens it is, and the answer is the same."""

    class Never(ByteTokenizer):
        longest_token: int | None = 3

        def encode(self, text: str) -> torch.Tensor:
            assert len(text) <= 3 * 255, "its tokens were asked for"
            return super().encode(text)

    served = serving()
    served.engine.tokenizer = Never()
    assert served.engine.longest == 256
    with running(served) as address:
        for text, least in (("x" * 2**20, 349526), ("x" * 766, 256)):
            code, answer = post(address, "/v1/completions", {"prompt": text})
            assert code == 400 and answer["error"]["param"] == "prompt"
            assert f"{len(text)} characters, which is {least} tokens or more" in answer["error"]["message"]
        messages = [{"role": "user", "content": "x" * 2**20}]
        code, answer = post(address, "/v1/chat/completions", {"messages": messages})
        assert code == 400 and answer["error"]["param"] == "messages"
        code, answer = post(address, "/v1/completions", {"prompt": "x" * 765})
        assert code == 400 and "the prompt has 765 tokens" in answer["error"]["message"]
        assert post(address, "/v1/completions", {"prompt": "x" * 60, "max_tokens": 2})[0] == 200


def test_errors_of_the_engine() -> None:
    broken = serving(FakeStepper(vocab_size=256, failing=[1, 3, 5, 6, 7, 8], max_requests=32))
    with running(broken) as address:
        code, answer = post(address, "/v1/completions", GOOD)
        assert code == 500 and "on fire" in answer["error"]["message"]
        text = exchange(address, "POST", "/v1/completions", json.dumps({**GOOD, "stream": True}).encode())[1]
        frames = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        assert "on fire" in json.loads(frames[-2])["error"]["message"] and frames[-1] == "[DONE]"
        assert exchange(address, "GET", "/health")[0] == 200
        for _ in range(3):
            assert post(address, "/v1/completions", GOOD)[0] in (500, 503)
        code, answer = exchange(address, "GET", "/health")
        assert code == 503 and "on fire" in answer["details"]
        assert post(address, "/v1/completions", GOOD)[0] == 503


def test_metrics_add_up(client: openai.OpenAI) -> None:
    counted = serving()
    with running(counted) as address:
        made = 0
        with openai.OpenAI(base_url=f"{address}/v1", api_key="any") as own:
            for prompt in ("some beginning that is shared: a", "some beginning that is shared: b", "c"):
                usage = own.completions.create(prompt=prompt, model="fake", max_tokens=7, n=2).usage
                made += usage.completion_tokens if usage is not None else 0
            scored = own.completions.create(prompt="only scored", model="fake", max_tokens=0, echo=True, logprobs=1)
            assert scored.usage is not None and scored.usage.completion_tokens == 0
        idle(counted)
        text = exchange(address, "GET", "/metrics")[1]
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels["model_name"] == "fake"
            values[sample.name] = values.get(sample.name, 0) + sample.value
    assert values["mgraph_generation_tokens_total"] == values["mgraph_request_generation_tokens_sum"] == made
    assert 'mgraph_steps_by_launch_total{launch="nothing is launched",model_name="' in text
    assert values["mgraph_request_success_total"] == values["mgraph_e2e_request_latency_seconds_count"] == 7
    assert values["mgraph_time_to_first_token_seconds_count"] == 6
    assert values["mgraph_num_requests_running"] == values["mgraph_num_requests_waiting"] == 0
    assert values["mgraph_kv_cache_usage_perc"] == 0
    assert values["mgraph_prefix_cache_hits_total"] >= 2 * 24
    assert values["mgraph_prompt_tokens_total"] == values["mgraph_request_prompt_tokens_sum"] == 32 + 32 + 1 + 11
    assert values["mgraph_prefix_cache_queries_total"] == 2 * (32 + 32 + 1), (
        "each of n; what is scored is not looked up"
    )
    assert (
        values["mgraph_request_prefill_time_seconds_count"] == values["mgraph_request_decode_time_seconds_count"] == 6
    )
    parts = ("queue", "prefill", "decode")
    whole = values["mgraph_e2e_request_latency_seconds_sum"]
    assert 0 < sum(values[f"mgraph_request_{part}_time_seconds_sum"] for part in parts) <= whole
    for name in ("prompt_tokens", "params_n", "params_max_tokens"):
        assert values[f"mgraph_request_{name}_count"] == 4, name
    assert values["mgraph_iteration_tokens_total_count"] == values["mgraph_steps_total"]
    assert values["mgraph_iteration_tokens_total_sum"] >= made


async def _streams(address: str, count: int) -> list[str]:
    """Texts of `count` streams at once."""
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0) as client:

        async def one(at: int) -> str:
            stream = await client.completions.create(prompt=f"prompt {at % 16}", stream=True, **GREEDY)
            return "".join([chunk.choices[0].text async for chunk in stream])

        return await asyncio.gather(*map(one, range(count)))


@pytest.mark.parametrize("count", [48, pytest.param(256, marks=pytest.mark.full)])
def test_many_streams_at_once(served: tuple[Serving, str], count: int) -> None:
    texts = asyncio.run(_streams(served[1], count))
    expected = [said(served, f"prompt {at}".encode())[0] for at in range(16)]
    assert texts == [expected[at % 16] for at in range(count)]


@pytest.mark.parametrize("count", [80, pytest.param(1000, marks=pytest.mark.full)])
def test_any_requests_in_any_order(served: tuple[Serving, str], count: int) -> None:
    """Good ones, wrong ones, and clients that leave: the good ones are answered as if alone."""
    source = random.Random(count)
    host, port = urlsplit(served[1]).netloc.split(":")
    expected = {at: said(served, f"prompt {at}".encode())[0] for at in range(8)}

    async def one(kind: str, at: int) -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        body: Any = {**GREEDY, "prompt": f"prompt {at}", "stream": kind == "leave"}
        raw = json.dumps(body).encode() if kind != "wrong" else source.choice([b"{", b"\xff", b'{"prompt": 3}', b"[]"])
        if kind == "half":
            raw = raw + b" " * 500
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(raw)}\r\n\r\n"
        writer.write(head.encode() + (raw[:20] if kind == "half" else raw))
        await writer.drain()
        if kind in ("good", "wrong"):
            answer = await reader.read()
            code, text = int(answer[9:12]), answer.partition(b"\r\n\r\n")[2]
            assert code == (200 if kind == "good" else 400), answer
            if kind == "good":
                assert json.loads(text)["choices"][0]["text"] == expected[at]
        elif kind == "leave":
            await reader.read(source.randrange(1, 400))
        writer.close()

    async def main() -> None:
        running_now: set[asyncio.Task[None]] = set()
        for _ in range(count):
            kind = source.choice(["good", "good", "wrong", "leave", "half"])
            running_now.add(asyncio.create_task(one(kind, source.randrange(8))))
            if len(running_now) > 24:
                done, running_now = await asyncio.wait(running_now, return_when=asyncio.FIRST_COMPLETED)
                [task.result() for task in done]
        await asyncio.gather(*running_now)

    asyncio.run(main())
    idle(served[0])
    assert exchange(served[1], "GET", "/health")[0] == 200
