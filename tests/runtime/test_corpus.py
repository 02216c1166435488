"""What `--data` names, how examples are split, and what is said and checked about them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mgraph.errors import DataError, OptionError
from mgraph.runtime.corpus import CLOCK, load_corpus
from mgraph.runtime.data import Corpus
from mgraph.runtime.options import parse
from mgraph.runtime.packing import PackedExamples
from mgraph.runtime.text import Windows
from mgraph.runtime.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from tests.runtime.chats import MARKED, write_jsonl, write_tokenizer

BYTES = ByteTokenizer()
TEXTS: Sequence[dict[str, Any]] = [{"text": chr(97 + n) * (n + 3)} for n in range(20)]


def load(data: Path | str, *arguments: str, segments: bool = True, tokenizer: Tokenizer = BYTES) -> Corpus:
    options = parse(["--data", str(data), "--seq-len", "30", *arguments], "train.py")
    return load_corpus(options, tokenizer, segments)


def parts(corpus: Corpus) -> tuple[PackedExamples, PackedExamples]:
    assert isinstance(corpus.train, PackedExamples) and isinstance(corpus.validation, PackedExamples)
    return corpus.train, corpus.validation


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "texts.jsonl", list(TEXTS))


def test_text_and_examples_are_told_apart_by_their_names(tmp_path: Path, jsonl: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text('{"text": "not an example"}\n' * 30)
    assert isinstance(load(tmp_path / "texts").train, Windows)
    assert isinstance(load("builtin").train, Windows)
    assert isinstance(load(jsonl).train, PackedExamples)
    more = tmp_path / "more"
    (more / "b").mkdir(parents=True)
    write_jsonl(more / "b" / "c.jsonl", list(TEXTS[:3]))
    write_jsonl(more / "a.jsonl", list(TEXTS[3:]))
    train, _ = parts(load(more))
    assert bytes(train.examples.tokens[:6].tolist()) == b"dddddd" and len(train.examples) == 20
    (more / "readme.md").write_text("text")
    with pytest.raises(DataError, match=r"holds both .jsonl files and others, such as .*readme.md"):
        load(more)
    with pytest.raises(DataError, match="absent: no such file"):
        load(tmp_path / "absent")


def test_split_by_examples_whatever_the_seed(jsonl: Path) -> None:
    train, validation = parts(load(jsonl))
    assert len(train.chosen) == 18 and len(validation.chosen) == 2
    assert sorted([*train.chosen, *validation.chosen]) == list(range(20))
    assert set(validation.chosen) != {18, 19}, "the last examples may be of one kind"
    other = parts(load(jsonl, "--seed", "9"))[1]
    assert other.chosen.tolist() == validation.chosen.tolist()


def test_identity_and_facts(tmp_path: Path, jsonl: Path) -> None:
    (tmp_path / "t.jinja").write_text(MARKED)
    corpus = load(jsonl, "--chat-template", str(tmp_path / "t.jinja"), "--long", "drop", "--end-of-text", "z")
    assert corpus.identity == {
        "--data (SHA-256)": hashlib.sha256(jsonl.read_bytes()).hexdigest(),
        "--chat-template (SHA-256)": hashlib.sha256(MARKED.encode()).hexdigest(),
        "--end-of-text": "z",
        "--long": "drop",
        "--pack": "yes",
    }
    lengths = [len(record["text"]) for record in TEXTS]
    # Of each text the first token is no target, and an end is one.
    assert corpus.tokens_per_byte == sum(lengths) / sum(lengths)
    assert load(jsonl).tokens_per_byte == (sum(lengths) - 20) / sum(lengths)
    assert load(jsonl, "--pack", "no").identity["--pack"] == load(jsonl, segments=False).identity["--pack"] == "no"


def test_end_of_text(tmp_path: Path, jsonl: Path) -> None:
    write_tokenizer(tmp_path / "t")
    tokenizer = load_tokenizer(tmp_path / "t", 1000)

    def last(*arguments: str) -> int:
        return int(parts(load(jsonl, *arguments, tokenizer=tokenizer))[0].examples.tokens[-1])

    assert last() == last("--end-of-text", "auto") == tokenizer.token_id("<|end|>")
    assert last("--end-of-text", "<|turn|>") == tokenizer.token_id("<|turn|>")
    assert last("--end-of-text", "none") == tokenizer.token_id("t")
    with pytest.raises(OptionError, match=r"the --end-of-text, '<x>', is no token of the tokenizer 't'"):
        last("--end-of-text", "<x>")
    config = tmp_path / "t" / "tokenizer_config.json"
    config.write_text('{"eos_token": "<gone>"}')
    tokenizer = load_tokenizer(tmp_path / "t", 1000)
    with pytest.raises(OptionError, match="eos_token of the tokenizer's configuration, '<gone>', is no token"):
        last()


def test_notes(tmp_path: Path, jsonl: Path) -> None:
    lengths = [len(record["text"]) for record in TEXTS]
    corpus = load(jsonl)
    assert corpus.notes[0] == (
        f"examples: 18 to train on, 2 to validate with; {sum(lengths)} tokens, {sum(lengths) - 20} of them targets; "
        "no token ends a text"
    )
    taken = sum(lengths[index] - 1 for index in parts(corpus)[0].chosen)
    count = len(parts(corpus)[0].rows(None))
    assert taken <= 30 * count < taken + 30 * 2
    packed = f"an epoch has {count} rows of 30 positions, {taken / (30 * count):.1%} of them filled"
    assert corpus.notes[1:] == (packed,)
    padding = 1 - taken / (18 * 30)
    alone = f"each example has a row of 30 positions to itself: {padding:.1%} of the positions are padding"
    assert load(jsonl, "--pack", "no").notes[1] == alone
    assert load(jsonl, segments=False).notes[1] == alone + "; a package compiled with --packed puts several into a row"
    assert load(jsonl, "--end-of-text", "z").notes[0].endswith("; texts end with 'z'")
    short = load(jsonl, "--seq-len", "20")
    assert short.notes[2] == "1 example cut to --seq-len"
    write_jsonl(jsonl, [*TEXTS, {"text": "a"}, {"text": "b"}])
    short = load(jsonl, "--seq-len", "19", "--long", "drop")
    assert short.notes[2] == "2 examples left out as too long, 2 examples left out without a target"
    (tmp_path / "t.jinja").write_text("{% generation %}{{ strftime_now('%d') }}{% endgeneration %}")
    write_jsonl(jsonl, [{"messages": [{"role": "assistant", "content": "a"}]}] * 2)
    chats = load(jsonl, "--chat-template", str(tmp_path / "t.jinja"))
    assert chats.notes[0] == "examples: 1 to train on, 1 to validate with; 4 tokens, 2 of them targets"
    assert chats.notes[-1] == CLOCK


def test_too_few_examples(tmp_path: Path) -> None:
    few = write_jsonl(tmp_path / "few.jsonl", [{"text": "enough"}, {"text": "a"}])
    with pytest.raises(DataError, match=r"1 examples with something to learn \(1 example left out without a target\);"):
        load(few)
    write_jsonl(few, [])
    with pytest.raises(DataError, match="holds 0 examples with something to learn"):
        load(few)
    write_jsonl(few, [{"text": "enough"}, {"text": "for a split"}])
    assert [len(part.chosen) for part in parts(load(few))] == [1, 1]


@pytest.mark.parametrize(
    "arguments",
    [("--chat-template", "t"), ("--end-of-text", "none"), ("--pack", "no"), ("--long", "drop")],
)
def test_options_for_examples_are_refused_for_text(arguments: tuple[str, str]) -> None:
    with pytest.raises(OptionError, match=f"{arguments[0]} is for examples, and --data builtin is text"):
        load("builtin", *arguments)


def test_packing_needs_segments(jsonl: Path) -> None:
    with pytest.raises(OptionError, match="--pack yes: the package does not take segment_ids"):
        load(jsonl, "--pack", "yes", segments=False)
