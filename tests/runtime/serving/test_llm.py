"""`LLM` on a stepper without a model: orders, errors, streams in turn, a running event loop."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from mgraph.runtime.chat import ChatTemplate
from mgraph.runtime.serving.engine import Engine
from mgraph.runtime.serving.llm import LLM
from mgraph.runtime.serving.parameters import RequestError, SamplingParams
from mgraph.runtime.tokenizer import ByteTokenizer
from tests.runtime.serving.fake_llm import GREEDY, expected, fresh_llm, nothing_left
from tests.runtime.serving.fake_stepper import FakeStepper

WRONG_PROMPTS: list[tuple[Any, str]] = [
    ("", "empty"),
    ([256], "token 256"),
    ([1, "a"], "|".join(("has 'a', which is no integer", "must be a text or a list of token ids, not 1"))),
    (["a", True], "|".join(("has 'a', which is no integer", "must be a text or a list of token ids, not True"))),
    (5, "must be a text"),
    (None, "must be a text"),
    (b"bytes", "must be a text"),
    (torch.tensor(5), "must be a text"),
    (torch.tensor([1.5]), "has 1.5, which is no integer|must be a text or a list of token ids, not 1.5"),
    ({"a": 1}, "must be a text"),
    ({1}, "must be a text"),
    ("ab\ud800", "half of a surrogate pair, '.ud800', as character 2"),
]


@pytest.fixture
def llm() -> LLM:
    return fresh_llm()


def test_results_are_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts: list[str | list[int]] = ["one", [116, 119, 111], "three"]
    outputs = llm.generate(prompts, GREEDY)
    assert [o.outputs[0].token_ids for o in outputs] == [expected(llm, p) for p in (b"one", b"two", b"three")]
    assert [o.prompt for o in outputs] == ["one", None, "three"]
    assert outputs[1].prompt_token_ids == (116, 119, 111)
    assert all(o.finished and o.outputs[0].finish_reason == "length" for o in outputs)
    one_row: Any = torch.tensor([116, 119, 111])
    rows: Any = np.array([[111, 110, 101], [116, 119, 111]])
    for again in ([116, 119, 111], one_row, one_row.numpy(), rows[1:], list(rows[1:])):
        assert llm.generate(again, GREEDY)[0].outputs[0].token_ids == expected(llm, b"two")
    assert [o.outputs[0].token_ids for o in llm.generate(rows, GREEDY)] == [expected(llm, p) for p in (b"one", b"two")]
    nothing_left(llm)


def test_parameters_for_each(llm: LLM) -> None:
    outputs = llm.generate(["a", "b"], [{"max_tokens": 2, "n": 3, "logprobs": 1, "prompt_logprobs": 0}, GREEDY])
    assert [len(o.outputs) for o in outputs] == [3, 1]
    first = outputs[0].outputs[2]
    assert first.logprobs is not None and len(first.logprobs) == len(first.token_ids) == 2
    assert first.cumulative_logprob == pytest.approx(sum(s.logprob for s in first.logprobs))
    assert outputs[0].prompt_logprobs == (None,) and outputs[1].prompt_logprobs is None
    for wrong in ([GREEDY], [], {"max_token": 1}):
        with pytest.raises(RequestError):
            llm.generate(["a", "b"], wrong)
    nothing_left(llm)


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("failing", [False, True])
def test_continuations_that_end_in_one_step(n: int, failing: bool, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = {"n": n, "max_tokens": 3, "ignore_eos": True}
    if failing:

        def broken(*_: Any) -> Any:
            raise RuntimeError("no step")

        monkeypatch.setattr(llm.engine.stepper, "run", broken)
    reason = "error" if failing else "length"
    for output in llm.generate(["one"] if failing else ["one", "two"], params):
        assert [one.finish_reason for one in output.outputs] == [reason] * n
    if not failing:  # an engine whose steps fail again and again takes no more
        ended = [delta.index for delta in llm.stream("two", params) if delta.finish_reason == reason]
        assert sorted(ended) == list(range(n))
    nothing_left(llm)


def test_a_prompt_may_only_be_scored(llm: LLM) -> None:
    """Nothing is generated then, and nothing counted; the scores are those that a longer request gives."""
    asked = {"prompt_logprobs": 1, "temperature": 0}
    scored, longer = llm.generate(["some text"] * 2, [{**asked, "max_tokens": 0}, {**asked, "max_tokens": 1}])
    assert scored.prompt_logprobs == longer.prompt_logprobs and len(scored.prompt_logprobs or ()) == 9
    (only,) = scored.outputs
    assert (only.text, only.token_ids, only.finish_reason) == ("", (), "length")
    assert llm.engine.generated == 1
    nothing_left(llm)


@pytest.mark.parametrize(("prompts", "message"), WRONG_PROMPTS)
def test_a_wrong_prompt_begins_nothing(llm: LLM, prompts: Any, message: str) -> None:
    for ask in (llm.generate, llm.stream):
        with pytest.raises(RequestError, match=message):
            ask(prompts, GREEDY)
        nothing_left(llm)


@pytest.mark.parametrize("several", [["a", ""], ["a", [256]], ["a", 5], [{1}], [None], {1: "a"}])
def test_a_wrong_one_among_prompts_begins_nothing(llm: LLM, several: Any) -> None:
    with pytest.raises(RequestError):
        llm.generate(several, GREEDY)
    nothing_left(llm)


@pytest.mark.parametrize("params", ["b", 5, ["b"], [5], [[GREEDY]]])
def test_parameters_that_are_none(llm: LLM, params: Any) -> None:
    with pytest.raises(RequestError, match="must be SamplingParams or a dict of its fields"):
        llm.generate("a", params)
    nothing_left(llm)


def test_streams_read_in_turn(llm: LLM) -> None:
    streams = [llm.stream(text, GREEDY) for text in ("one", "two")]
    tokens: list[list[int]] = [[], []]
    for _ in range(8):
        for at, stream in enumerate(streams):
            tokens[at] += next(stream).tokens
    assert [tuple(t) for t in tokens] == [expected(llm, b"one"), expected(llm, b"two")]
    assert [next(stream, None) for stream in streams] == [None, None]
    left = llm.stream("three", GREEDY)
    next(left)
    left.close()  # type: ignore[attr-defined]  # it is a generator
    nothing_left(llm)


def test_a_stream_that_nobody_reads_begins_nothing() -> None:
    llm = LLM.over(Engine(FakeStepper(vocab_size=256, num_blocks=40, max_length=128, seconds=0.01), ByteTokenizer()))
    for begun in (False, True):
        dropped = llm.stream("one", {"temperature": 0, "max_tokens": 100})
        if begun:
            assert next(dropped).tokens == expected(llm, b"one")[:1] and llm.engine.unfinished
        del dropped
        nothing_left(llm)
    assert llm.engine.steps < 50
    with pytest.raises(RequestError, match="token 256"):
        llm.stream([256], GREEDY)
    nothing_left(llm)


def test_inside_a_running_event_loop(llm: LLM) -> None:
    async def inside() -> tuple[int, ...]:
        return llm.generate("one", GREEDY)[0].outputs[0].token_ids

    assert asyncio.run(inside()) == expected(llm, b"one")


def test_chat(llm: LLM) -> None:
    output = llm.chat([{"role": "user", "content": "hi"}], GREEDY)[0]
    assert output.outputs[0].token_ids == expected(llm, b"user: hi\nassistant: ")
    assert output.prompt == "user: hi\nassistant: "
    with pytest.raises(RequestError, match="maximum context length") as caught:
        llm.chat([{"role": "user", "content": "x" * 200}])
    assert caught.value.param == "messages"
    with pytest.raises(RequestError, match="half of a surrogate pair") as caught:
        llm.chat([{"role": "user", "content": "\udfff"}])
    assert caught.value.param == "messages"
    without = LLM.over(Engine(llm.engine.stepper, ByteTokenizer()))
    with pytest.raises(RequestError, match=r"no chat template(.|\n)*--chat-template FILE \(chat_template in Python\)"):
        without.chat([{"role": "user", "content": "hi"}])


def test_more_variables_of_the_template(llm: LLM) -> None:
    source = "{{ messages[0].content }}{% if thinking %} (think {{ depth }}){% endif %}{{ eos_token }}:"
    template = ChatTemplate(source, {"eos_token": "."}, "the test")
    asking = LLM.over(Engine(llm.engine.stepper, ByteTokenizer()), template)
    message = [{"role": "user", "content": "hi"}]
    for given, expected_prompt in ((None, "hi.:"), ({"thinking": True, "depth": 3, "more": 1}, "hi (think 3).:")):
        assert asking.chat(message, GREEDY, chat_template_kwargs=given)[0].prompt == expected_prompt
    wrong: list[tuple[Any, str]] = [(5, "must map names"), ({1: 2}, "must map names")]
    wrong += [({name: 1}, f"has '{name}'") for name in ("messages", "tools", "add_generation_prompt", "eos_token")]
    for given, said in wrong:
        with pytest.raises(RequestError, match=said) as caught:
            asking.chat(message, GREEDY, chat_template_kwargs=given)
        assert caught.value.param == "chat_template_kwargs"


def test_conversations_in_parts_and_of_tools(llm: LLM) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    of_parts: list[dict[str, Any]] = [{"role": "user", "content": parts}]
    of_tools: list[dict[str, Any]] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {"role": "tool", "content": "4"},
    ]
    first, second = llm.chat([of_parts, of_tools], GREEDY)
    assert first.outputs[0].token_ids == expected(llm, b"user: hi\nassistant: ")
    assert second.outputs[0].token_ids == expected(llm, b"user: x\nassistant: \ntool: 4\nassistant: ")
    assert of_parts[0]["content"] is parts, "what was given stays as it was"


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        ('{"city": "Paris"}', '{"city": "Paris"}'),
        ({"city": "Paris"}, '{"city": "Paris"}'),
        ("no JSON {", '"no JSON {"'),
        ("[1]", '"[1]"'),
    ],
)
def test_templates_see_arguments_of_tools_as_objects(arguments: Any, seen: str) -> None:
    """OpenAI's form has them as a text, transformers' templates write them as JSON."""
    stepper = FakeStepper(vocab_size=256, num_blocks=40, max_length=128)
    text = (
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    llm = LLM.over(Engine(stepper, ByteTokenizer()), ChatTemplate(text, {}, "the test"))
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    (output,) = llm.chat([{"role": "assistant", "content": None, "tool_calls": [call]}], GREEDY)
    assert output.prompt == seen and call["function"]["arguments"] == arguments  # type: ignore[index]


@pytest.mark.parametrize(("given", "param"), [({1: 2}, "params"), ({"stop_token_ids": [10**5000]}, "stop_token_ids")])
def test_wrong_parameters_are_told_however_wrong(llm: LLM, given: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate("a", given)
    assert caught.value.param == param and len(str(caught.value)) < 300
    with pytest.raises(RequestError, match="token a number of 16610 bits"):
        llm.generate([10**5000])


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (5, "messages"),
        (None, "messages"),
        ("hi", "messages"),
        ({"role": "user", "content": "hi"}, "messages"),
        ([{"content": "x"}], "messages.0.role"),
        ([{"role": "king", "content": "x"}], "messages.0.role"),
        ([{"role": "user", "content": "x"}, 5], "messages.1"),
        ([{"role": "user", "content": 3}], "messages.0.content"),
        ([{"role": "user"}], "messages.0.content"),
        ([{"role": "assistant", "content": None}], "messages.0.content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages.0.content"),
        ([{"role": "user", "content": ["x"]}], "messages.0.content"),
    ],
)
def test_what_is_no_conversation(llm: LLM, messages: Any, param: str) -> None:
    good = [{"role": "user", "content": "hi"}]
    for asked in (messages, [good, messages]):
        with pytest.raises(RequestError) as caught:
            llm.chat(asked, GREEDY)
        assert caught.value.param == param
        nothing_left(llm)


def test_no_messages_and_wrong_tools(llm: LLM) -> None:
    empty: list[Any] = [[], [[]]]
    for none in empty:
        with pytest.raises(RequestError, match="has no messages"):
            llm.chat(none)
    tools: Any = "find"
    with pytest.raises(RequestError, match="tools must be a list, not 'find'"):
        llm.chat([{"role": "user", "content": "hi"}], tools=tools)


def test_the_cache_can_be_forgotten(llm: LLM) -> None:
    cached = []
    for forget in (False, False, True):
        if forget:
            llm.reset_prefix_cache()
        cached.append(llm.generate("a prompt of some blocks", GREEDY)[0].cached_tokens)
    assert cached == [0, 20, 0]
    nothing_left(llm)


def test_public_names() -> None:
    import mgraph
    import mgraph.runtime

    assert mgraph.LLM is mgraph.runtime.LLM is LLM
    assert mgraph.SamplingParams is mgraph.runtime.SamplingParams is SamplingParams


def test_what_was_under_way_at_a_reset_is_not_found_later(llm: LLM) -> None:
    prompt = "a little more than one block"
    stream = llm.stream(prompt, GREEDY)
    next(stream)
    llm.reset_prefix_cache()
    tokens = [token for delta in stream for token in delta.tokens]
    assert len(tokens) == 7
    (output,) = llm.generate(prompt * 2, GREEDY)
    assert output.cached_tokens == 0
    assert llm.generate(prompt * 2, GREEDY)[0].cached_tokens > 0
    nothing_left(llm)
