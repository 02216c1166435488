"""Lines of JSON to tokens and targets, in all three forms, and what is wrong with lines."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mgraph.errors import DataError
from mgraph.runtime import examples as examples_module
from mgraph.runtime.chat import ChatTemplate
from mgraph.runtime.examples import Census, Examples, Reading, read_examples
from mgraph.runtime.tokenizer import ByteTokenizer, FileTokenizer
from tests.runtime.chats import PLAIN, write_jsonl, write_tokenizer

TEMPLATE = ChatTemplate(PLAIN["chatml"], {}, "t")
BYTES = Reading(ByteTokenizer(), TEMPLATE, None, 1000, "error")


def learned(examples: Examples, index: int) -> tuple[bytes, bytes]:
    """An example of bytes, and its targets alone."""
    place = slice(examples.offsets[index], examples.offsets[index + 1])
    tokens = examples.tokens[place]
    return bytes(tokens.tolist()), bytes(tokens[examples.targets[place]].tolist())


def read(path: Path, records: list[dict[str, Any]], **changes: Any) -> tuple[Examples, Census]:
    return read_examples([write_jsonl(path / "data.jsonl", records)], dataclasses.replace(BYTES, **changes))


def test_forms(tmp_path: Path) -> None:
    """The first token of an example is no target, since nothing comes before it."""
    examples, census = read(
        tmp_path,
        [
            {"text": "wörd", "id": 7},
            {"completion": "answer", "prompt": "qü "},
            {"prompt": "", "completion": "answer"},
            {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "ä", "name": None}]},
        ],
    )
    assert [learned(examples, index) for index in range(3)] == [
        ("wörd".encode(), "örd".encode()),
        ("qü answer".encode(), b"answer"),
        (b"answer", b"nswer"),
    ]
    text, answer = learned(examples, 3)
    assert text.decode() == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nä<|im_end|>\n"
    assert answer.decode() == "ä<|im_end|>\n"
    assert (len(examples), census.lines, census.without_targets) == (4, 4, 0)
    assert examples.num_targets == 4 + 6 + 5 + 13
    assert examples.positions.tolist() == [4, 9, 5, len(text) - 1]
    raw = "wördansweranswer".encode() + answer
    assert np.array_equal(census.byte_counts, np.bincount(list(raw), minlength=256))


@pytest.mark.parametrize("add_bos", [False, True])
def test_special_tokens_around_texts(tmp_path: Path, add_bos: bool) -> None:
    """Against transformers: a text as it tokenizes it, then the end of text. Conversations get nothing added."""
    theirs = write_tokenizer(tmp_path / "t", PLAIN["chatml"], add_bos_token=add_bos)
    end = theirs.eos_token_id
    records: list[dict[str, Any]] = [
        {"text": "the quick"},
        {"prompt": "says ", "completion": "yes fox"},
        {"prompt": "says", "completion": ""},
        {"messages": [{"role": "assistant", "content": "no"}]},
    ]
    tokenizer = FileTokenizer(tmp_path / "t")
    examples, _ = read(tmp_path, records, tokenizer=tokenizer, end_of_text=end)
    rows = [examples.tokens[a:b].tolist() for a, b in pairwise(examples.offsets)]
    texts = ["the quick", "says yes fox", "says"]
    assert rows[:3] == [[*theirs(text)["input_ids"], end] for text in texts]
    assert rows[3] == theirs.apply_chat_template(records[3]["messages"], return_dict=True)["input_ids"]
    targets = [examples.targets[a:b].tolist() for a, b in pairwise(examples.offsets)]
    prompt = len(theirs("says ")["input_ids"])
    assert targets[0] == [False] + [True] * (len(rows[0]) - 1)
    assert targets[1] == [False] * prompt + [True] * (len(rows[1]) - prompt)
    assert targets[2] == [False] * (len(rows[2]) - 1) + [True]


@pytest.mark.parametrize("limit", [1, 50, 1 << 20])
def test_batches_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(examples_module, "BATCH_CHARACTERS", limit)
    texts = [f"{'long ' * (n % 7)}text {n}" for n in range(40)]
    examples, census = read(tmp_path, [{"text": text} for text in texts])
    assert [learned(examples, index)[0].decode() for index in range(40)] == texts
    assert census.byte_counts.sum() == sum(map(len, texts)) and examples.tokens.dtype == np.uint8


def test_files_in_order_blank_lines_and_fingerprint(tmp_path: Path) -> None:
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    a.write_bytes(b'\n{"text": "one"}\r\n  \n{"text": "two"}')
    b.write_bytes(b'{"text": "three"}\n')
    examples, census = read_examples([a, b], BYTES)
    assert [learned(examples, index)[0] for index in range(3)] == [b"one", b"two", b"three"]
    assert census.lines == 3
    assert census.fingerprint == hashlib.sha256(a.read_bytes() + b.read_bytes()).hexdigest()


def test_long_examples(tmp_path: Path) -> None:
    """10 positions hold 11 tokens: the last is a label alone."""
    records = [{"text": "elevenchars"}, {"text": "twelve chars"}, {"prompt": "eleven char", "completion": "s"}]
    examples, census = read(tmp_path, records, seq_len=10, long="cut")
    assert [learned(examples, index)[0] for index in range(len(examples))] == [b"elevenchars", b"twelve char"]
    assert (census.cut, census.dropped, census.without_targets) == (2, 0, 1)
    examples, census = read(tmp_path, records, seq_len=10, long="drop")
    assert (len(examples), census.cut, census.dropped, census.without_targets) == (1, 0, 2, 0)
    with pytest.raises(DataError, match=r"takes 11 positions, a row has 10") as caught:
        read(tmp_path, records, seq_len=10)
    assert caught.value.where == f"{tmp_path / 'data.jsonl'}:2"


def test_nothing_to_learn(tmp_path: Path) -> None:
    examples, census = read(tmp_path, [{"text": "a"}, {"text": ""}, {"prompt": "a", "completion": ""}])
    assert (len(examples), len(examples.tokens), census.without_targets) == (0, 0, 3)


TURN = {"role": "user", "content": "q"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', "the line is no JSON: Expecting ',' delimiter"),
        (b'{"text": "\xff"}', "the line is no JSON: 'utf-8' codec can't decode byte 0xff"),
        (b'["text"]', "the line is a JSON list"),
        (b"[" * 100000, "the line is no JSON"),
        (b"{}", "no known form: its keys are none"),
        (b'{"prompt": "a", "answer": "b"}', "no known form: its keys are 'prompt', 'answer'"),
        (b'{"text": "a", "messages": []}', "the keys of 2 forms: its keys are 'text', 'messages'"),
        (b'{"text": 3}', "'text' is int, not text"),
        (b'{"prompt": "a", "completion": null}', "'completion' is NoneType, not text"),
        (b'{"text": "a\\ud83d"}', "'text' has half of a surrogate pair at character 1"),
        (b'{"messages": {}}', "'messages' is not a list of turns"),
        (b'{"messages": []}', "'messages' is not a list of turns"),
        (json.dumps({"messages": [TURN], "tools": {}}).encode(), "'tools' is dict, not a list"),
        (json.dumps({"messages": [TURN]}).encode(), "the conversation has no turn of the assistant"),
        (b'{"messages": ["hello"]}', "turn 1 is str, not an object"),
        (b'{"messages": [{"content": "a"}]}', "turn 1 has no 'role'"),
        (
            json.dumps({"messages": [TURN, {"role": "bot", "content": "a"}]}).encode(),
            "turn 2 has the unknown role 'bot'",
        ),
        (json.dumps({"messages": [{"role": ["user"], "content": "a"}]}).encode(), "turn 1 has the unknown role"),
        (b'{"messages": [{"role": "user"}]}', "turn 1 has no 'content'"),
        (b'{"messages": [{"role": "user", "content": ["a"]}]}', "the content of turn 1 is list, not text"),
        (
            json.dumps({"messages": [TURN, {"role": "assistant", "content": ""}]}).encode(),
            "turn 2 is the assistant's and",
        ),
        (json.dumps({"messages": [{"role": "user", "content": "\ufdd0"}]}).encode(), "turn 1 has U"),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + line + b"\n")
    with pytest.raises(DataError, match=message) as caught:
        read_examples([path], BYTES)
    assert caught.value.where == f"{path}:3" and caught.value.hint


def test_errors_of_templates_name_the_line(tmp_path: Path) -> None:
    record = {"messages": [TURN, {"role": "assistant", "content": "a"}]}
    with pytest.raises(DataError, match="there is no chat template") as caught:
        read(tmp_path, [record], template=None)
    assert caught.value.where == f"{tmp_path / 'data.jsonl'}:1"
    with pytest.raises(DataError, match="refuses the conversation: never") as caught:
        read(tmp_path, [record], template=ChatTemplate("{{ raise_exception('never') }}", {}, "mine"))
    assert caught.value.where == f"{tmp_path / 'data.jsonl'}:1, by mine"


def test_turns_that_call_tools_may_say_nothing(tmp_path: Path) -> None:
    turn = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    template = ChatTemplate(
        "{{ tools | tojson }}{% for m in messages %}{{ m.tool_calls | tojson }}{% endfor %}", {}, "t"
    )
    examples, _ = read(tmp_path, [{"messages": [turn], "tools": ["f"]}], template=template)
    assert learned(examples, 0) == (b'["f"][{"name": "f"}]', b'[{"name": "f"}]')
