"""Chat templates against `transformers`: the text, the tokens, and which of them are the assistant's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mgraph.errors import DataError
from mgraph.runtime.chat import ChatTemplate, load_template
from mgraph.runtime.examples import Reading, read_examples
from mgraph.runtime.tokenizer import FileTokenizer
from tests.runtime.chats import BLOCKS, CHATS, MARKED, PLAIN, write_jsonl, write_tokenizer

USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("template", "marked"),
    [
        (PLAIN["chatml"], BLOCKS["chatml"]),
        (PLAIN["llama3"], BLOCKS["llama3"]),
        (BLOCKS["llama3"], BLOCKS["llama3"]),
        (MARKED, MARKED),
    ],
    ids=["chatml", "llama3", "llama3-marked", "marked"],
)
def test_tokens_and_mask_equal_transformers(tmp_path: Path, template: str, marked: str) -> None:
    """Found by prefixes or by marks; transformers always needs marks."""
    theirs = write_tokenizer(tmp_path / "tokenizer", template)
    tokenizer = FileTokenizer(tmp_path / "tokenizer")
    ours = load_template(None, tokenizer.chat_template, tokenizer.special_tokens)
    assert ours is not None and ours.source == template
    data = write_jsonl(tmp_path / "data.jsonl", [{"messages": chat} for chat in CHATS])
    examples, census = read_examples([data], Reading(tokenizer, ours, None, 1000, "error"))
    assert len(examples) == len(CHATS) == census.lines
    for index, chat in enumerate(CHATS):
        assert ours.render(chat).text == theirs.apply_chat_template(chat, tokenize=False)
        expected: dict[str, Any] = theirs.apply_chat_template(
            chat, chat_template=marked, return_assistant_tokens_mask=True, return_dict=True
        )
        place = slice(examples.offsets[index], examples.offsets[index + 1])
        assert examples.tokens[place].tolist() == expected["input_ids"]
        assert examples.targets[place].tolist() == expected["assistant_masks"]
        assert 0 < sum(expected["assistant_masks"]) < len(expected["input_ids"])


def test_spans_are_what_the_assistant_says() -> None:
    plain = ChatTemplate(PLAIN["chatml"], {}, "t").render([USER, ANSWER, USER, ANSWER])
    assert [plain.text[start:end] for start, end in plain.spans] == ["b<|im_end|>\n"] * 2
    marked = ChatTemplate(MARKED, {"bos_token": "<s>", "eos_token": "</s>"}, "t").render([USER, ANSWER, ANSWER])
    assert marked.text == "<s>\nuser 1: a\nassistant: b</s>\nassistant: b</s>\n"
    assert [marked.text[start:end] for start, end in marked.spans] == ["b</s>"] * 2


def test_functions_of_templates() -> None:
    source = "{{ tools | tojson(indent=1) }}{% generation %}{{ messages[0] | tojson }}{% endgeneration %}"
    rendered = ChatTemplate(source, {}, "t").render([{"role": "assistant", "content": "<é>"}], [{"f": "'&'"}])
    assert rendered.text == '[\n {\n  "f": "\'&\'"\n }\n]{"role": "assistant", "content": "<é>"}'
    clock = ChatTemplate("{{ strftime_now('%Y') }}", {}, "t")
    assert clock.reads_clock and clock.render([USER]).text.isdigit() and len(clock.render([USER]).text) == 4
    assert not ChatTemplate(MARKED, {}, "t").reads_clock


def test_a_template_that_forgets_is_an_error() -> None:
    """Some templates drop the thoughts of earlier turns, so their text is not a prefix of what follows."""
    source = (
        "{% for m in messages %}<{{ m.role }}>{% if loop.last and m.thought %}[{{ m.thought }}]{% endif %}"
        "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    template = ChatTemplate(source, {}, "mine")
    thinking = {**ANSWER, "thought": "t"}
    assert template.render([USER, thinking]).spans == [(18, 22)]
    with pytest.raises(
        DataError, match=r"which part of the text is turn 2, .* writes that turn in another way"
    ) as caught:
        template.render([USER, thinking, USER, ANSWER])
    assert caught.value.where == "mine" and "generation" in str(caught.value.hint)
    source = "{% for m in messages %}{{ loop.length }}{{ m.content }}{% endfor %}"
    with pytest.raises(DataError, match=r"turn 2, .* writes what comes before in another way"):
        ChatTemplate(source, {}, "mine").render([USER, ANSWER])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for m in messages %}", "the chat template is not valid: Unexpected end of template"),
        ("{% generation %}{{ messages[0] }}", "not valid"),
    ],
)
def test_broken_templates(source: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        ChatTemplate(source, {}, "mine")
    assert caught.value.where == "mine, line 1"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ messages.append(1) }}", "access to attribute 'append'"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__'"),
        ("{{ 1 // 0 }}", "division"),
        ("{% include '/etc/hostname' %}", "no loader"),
    ],
)
def test_refusals_and_the_sandbox(source: str, message: str) -> None:
    with pytest.raises(DataError, match=f"the chat template refuses the conversation: .*{message}") as caught:
        ChatTemplate(source, {}, "mine").render([USER])
    assert caught.value.where == "mine"


def test_where_a_template_is_from(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{{ 1 }}")
    file = load_template(tmp_path / "t.jinja", "{{ 2 }}", {})
    own = load_template(None, "{{ 2 }}", {})
    assert file is not None and own is not None
    assert (file.render([USER]).text, own.render([USER]).text) == ("1", "2")
    assert load_template(None, None, {}) is None
    with pytest.raises(DataError, match=r"absent.jinja cannot be read: .*No such file"):
        load_template(tmp_path / "absent.jinja", None, {})
