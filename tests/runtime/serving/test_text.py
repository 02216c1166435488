"""Pieces of text, put together, are the text; strings that end it are found however tokens cut them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, trainers

from mgraph.runtime.serving.continuation import Continuation
from mgraph.runtime.serving.parameters import SamplingParams
from mgraph.runtime.serving.text import Detokenizer, Starts, StopStrings, token_bytes, token_text
from mgraph.runtime.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer

TEXT = "Größe 日本語 and emoji 👩‍🚀🏳️‍🌈, naïve café; tabs\tand\n\n  blanks "


def pieces(stop: StopStrings, parts: Sequence[str]) -> tuple[str, str | None]:
    said = ""
    for part in parts:
        text, hit = stop.add(part)
        said += text
        if hit is not None:
            return said, hit
    return said + stop.flush(), None


def cuts(text: str) -> list[list[str]]:
    """Every way to cut a text into pieces."""
    made = []
    for marks in itertools.product([False, True], repeat=len(text) - 1):
        parts = [text[0]]
        for mark, sign in zip(marks, text[1:], strict=True):
            if mark:
                parts.append(sign)
            else:
                parts[-1] += sign
        made.append(parts)
    return made


@pytest.mark.parametrize("keep", [False, True])
def test_every_cut_of_a_text_finds_the_same_stop(keep: bool) -> None:
    for text, stops, start, stop in [
        ("ab##cd", ["##"], 2, "##"),
        ("aaaab", ["aab"], 2, "aab"),
        ("xabcab", ["abcd", "bc"], 2, "bc"),
        ("ENDED", ["ED", "END"], 0, "END"),
        ("12", ["2"], 1, "2"),
    ]:
        expected = text[: start + len(stop)] if keep else text[:start]
        for parts in cuts(text):
            found = pieces(StopStrings(stops, keep), parts)
            # Where one piece completes two strings, the one that is complete first counts.
            assert found == (expected, stop), parts


@pytest.mark.parametrize("keep", [False, True])
def test_strings_end_no_text_before_they_may_but_may_begin_there(keep: bool) -> None:
    """The first that ends behind the first `early` characters counts, however the text is cut."""
    for text, stops in [
        ("ab##cd##", ["##"]),
        ("xabcab", ["abcd", "bc", "cab"]),
        ("aaaa", ["aa"]),
        ("xabyab", ["xaby", "ab"]),
    ]:
        for early in range(len(text)):
            ends = [(at + len(s), at, s) for s in stops for at in range(len(text)) if text.startswith(s, at)]
            first = min((end for end in ends if end[0] > early), default=None)
            for parts in cuts(text):
                starts = [0, *itertools.accumulate(map(len, parts))]
                if early not in starts:
                    continue
                stop, said, hit = StopStrings(stops, keep), "", None
                for at, part in zip(starts, parts, strict=False):
                    piece, hit = stop.add(part, look=at >= early)
                    said += piece
                    if hit is not None:
                        break
                said += stop.flush() if hit is None else ""
                wanted = (text, None) if first is None else (text[: first[0] if keep else first[1]], first[2])
                assert (said, hit) == wanted, (parts, early)


def test_what_is_kept_back_comes_at_the_end() -> None:
    stop = StopStrings(["##end"])
    assert stop.add("a##en") == ("a", None)
    assert stop.add("!") == ("##en!", None)
    assert stop.add("#") == ("", None)
    assert stop.flush() == "#"


@settings(max_examples=200, deadline=None)
@given(st.text("ab#", max_size=12), st.lists(st.text("ab#", min_size=1, max_size=3), max_size=3), st.data())
def test_stops_do_not_depend_on_the_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    whole = pieces(StopStrings(stops), list(text))
    at, parts = 0, []
    while at < len(text):
        size = data.draw(st.integers(1, 4))
        parts.append(text[at : at + size])
        at += size
    assert pieces(StopStrings(stops), parts) == whole


def test_bytes_come_as_whole_characters() -> None:
    tokenizer = ByteTokenizer()
    made = Detokenizer(tokenizer)
    parts = [made.add(byte) for byte in TEXT.encode()]
    assert "".join(parts) + made.flush() == TEXT
    assert not any("\ufffd" in part for part in parts)
    broken = Detokenizer(tokenizer)
    assert broken.add(0xE6) + broken.add(300) + broken.add(0x97) == "", "a model may have more tokens than bytes"
    assert broken.flush() == "\ufffd"
    assert (token_text(tokenizer, 300), token_bytes(tokenizer, 300)) == ("", [])
    assert (token_text(tokenizer, 0xE6), token_bytes(tokenizer, 0xE6)) == ("\ufffd", [0xE6])


def test_a_string_that_the_last_token_leaves_open_ends_a_text() -> None:
    """Bytes that are no character are taken for one when nothing more comes."""
    made = Continuation([97], SamplingParams(max_tokens=3, stop=["x\ufffd"]), 3, ByteTokenizer(), [])
    said = [made.add(byte) for byte in b"ax\xe6"]
    assert "".join(one.text for one in said) == "a"
    assert (said[-1].finish_reason, said[-1].stop_reason) == ("stop", "x\ufffd")


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> FileTokenizer:
    """A byte-level BPE that knows little, so that characters are cut into tokens, with a special token."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(["and and blanks tabs emoji and"], trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    library.save(str(path))
    return FileTokenizer(path)


@pytest.fixture(scope="module")
def metaspace(tmp_path_factory: pytest.TempPathFactory) -> FileTokenizer:
    return metaspace_in(tmp_path_factory.mktemp("tokenizer"))


def metaspace_in(directory: Path) -> FileTokenizer:
    """Of the kind where a token's blank is part of it, and the first one's is not written. Token 0 is a special one."""
    vocab = [("<unk>", 0.0), *((f"<0x{i:02X}>", -9.0) for i in range(256)), ("▁and", -1.0), ("▁", -2.0), ("a", -3.0)]
    library = Library(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    library.add_special_tokens(["<unk>"])
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    path = directory / "tokenizer.json"
    library.save(str(path))
    return FileTokenizer(path)


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
@pytest.mark.parametrize("text", [TEXT, "and and and", "👩‍🚀", "日本語" * 30])
def test_tokens_of_files_come_as_whole_characters(kind: str, text: str, request: pytest.FixtureRequest) -> None:
    tokenizer: FileTokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode(text).tolist()
    assert len(ids) >= len(text.split())
    made = Detokenizer(tokenizer)
    parts = [made.add(token) for token in ids]
    assert "".join(parts) + made.flush() == tokenizer.decode(ids) == text
    assert not any("\ufffd" in part for part in parts)


@pytest.mark.parametrize("kind", ["byte_level", "metaspace", "bytes"])
def test_a_completion_is_what_it_adds_to_its_prompt(kind: str, request: pytest.FixtureRequest) -> None:
    """Also its first blank, and wherever a text is cut into the two; a character that is cut is the completion's."""
    tokenizer: Tokenizer = ByteTokenizer() if kind == "bytes" else request.getfixturevalue(kind)
    for text in (TEXT, "and and", "a and  and", "👩👩 and日 and", "a\ufffd\ufffd and"):
        ids = tokenizer.encode(text).tolist()
        parts = [token_bytes(tokenizer, token) for token in ids]
        raw, ends = bytes(itertools.chain(*parts)), [0, *itertools.accumulate(map(len, parts))]
        first = raw.decode().removesuffix(text)  # the blank that is not written at the beginning
        places = [max(0, len(raw[:end].decode(errors="ignore")) - len(first)) for end in ends]
        for cut in range(len(ids) + 1):
            if "\ufffd" in text and raw[: ends[cut]].decode(errors="replace") != raw[: ends[cut]].decode(
                errors="ignore"
            ):
                continue  # amid that sign the prompt ends with what looks the same
            made = Detokenizer(tokenizer, before=ids[:cut])
            assert "".join(made.add(token) for token in ids[cut:]) + made.flush() == text[places[cut] :], cut
            starts = Starts(tokenizer, before=ids[:cut], first=places[cut])
            assert [starts.add(token) for token in ids[cut:]] == places[cut:-1], cut


@pytest.mark.parametrize("kind", ["byte_level", "metaspace", "bytes"])
def test_a_character_that_a_prompt_begins_and_nothing_ends(kind: str, request: pytest.FixtureRequest) -> None:
    """The signs that stand for its bytes are the prompt's, and those after bytes that are no text are none's."""
    tokenizer: Tokenizer = ByteTokenizer() if kind == "bytes" else request.getfixturevalue(kind)
    *character, word = tokenizer.encode("日a").tolist()[-4:]
    for prompt in (character[:1], character[:2], [word, *character[:2]], [word, *character[1:], *character[:2]]):
        made = Detokenizer(tokenizer, before=prompt)
        assert made.held == "" and made.add(word) + made.flush() == "a", prompt
        made = Detokenizer(tokenizer, before=prompt)
        assert made.flush() == "", prompt
    made = Detokenizer(tokenizer, before=[word, character[0]])
    assert [made.add(token) for token in character[1:]] == ["", "日"]
    stop = Continuation([word, character[0]], SamplingParams(stop=["日"]), 9, tokenizer, [])
    assert [stop.add(token).stop_reason for token in character[1:]] == [None, "日"]


def test_the_blank_of_a_completion_waits_for_a_prompt_with_a_text(metaspace: FileTokenizer) -> None:
    """One that has only special tokens, or tokens that the tokenizer lacks, has none; behind some there may be one."""
    special, blank, word = 0, metaspace.token_id("▁"), metaspace.token_id("▁and")
    assert blank is not None and word is not None and metaspace.decode([special]) == ""
    for prompt, expected in (
        ([], "and and"),
        ([special], "and and"),
        ([500], "and and"),
        ([blank], " and and"),
        ([special, blank], " and and"),
        ([word, *[special] * 99], " and and"),
        ([word, 500, 501, special], " and and"),
    ):
        made = Detokenizer(metaspace, before=prompt)
        assert made.add(word) + made.add(word) + made.flush() == expected, prompt
    assert (token_text(metaspace, word), token_text(metaspace, blank)) == (" and", " ")


def test_bytes_that_are_no_text_do_not_stop_it(byte_level: FileTokenizer) -> None:
    broken = byte_level.token_id("æ")  # how the byte 0xE6 is written there
    assert broken is not None
    made = Detokenizer(byte_level)
    parts = [made.add(broken) for _ in range(50)]
    assert "".join(parts).count("\ufffd") >= 40, "held back for ever"
    assert made.add(10_000) == ""


@pytest.mark.parametrize("before", ["special", "stray"])
@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
def test_no_character_is_lost_after_what_is_none(kind: str, before: str, request: pytest.FixtureRequest) -> None:
    """Tokens without a text, or bytes that are no character, however many, and then a character in several tokens."""
    tokenizer: FileTokenizer = request.getfixturevalue(kind)
    character = tokenizer.encode("a👩a").tolist()[1:]
    first = 0 if before == "special" else character[2]
    for count in range(13):
        ids = [first] * count + character
        made = Detokenizer(tokenizer)
        assert "".join([made.add(token) for token in ids]) + made.flush() == tokenizer.decode(ids), count


class Counting:
    """A tokenizer that notes how many tokens it was asked to write at once."""

    def __init__(self, tokenizer: FileTokenizer) -> None:
        self._tokenizer = tokenizer
        self.sizes: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def decode(self, ids: list[int], special: bool = False) -> str:
        self.sizes.append(len(ids))
        return self._tokenizer.decode(ids, special)


@pytest.mark.parametrize("token", ["<end>", "æ", "a"])
def test_a_token_costs_the_same_however_many_came_before(byte_level: FileTokenizer, token: str) -> None:
    """One that is skipped, one that is part of a character, and one with a text."""
    number = byte_level.token_id(token)
    assert number is not None
    counting = Counting(byte_level)
    made = Detokenizer(counting)
    for _ in range(1000):
        made.add(number)
    assert max(counting.sizes) <= 16
    assert len(counting.sizes) <= 6000


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("é x".encode(), [0, 0, 1, 2]),
        ("日本👩 a".encode(), [0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 4]),
        (b"\xe9x\xff\xffy\xf0\x9fz", [0, 1, 2, 3, 4, 5, 5, 6]),  # bytes that are no text, a sign for each or for two
        (b"a\xe6\x97", [0, 1, 1]),
    ],
)
def test_where_bytes_begin(raw: bytes, expected: list[int]) -> None:
    starts = Starts(ByteTokenizer())
    assert [starts.add(byte) for byte in raw] == expected
    later = Starts(ByteTokenizer(), first=7)
    assert [later.add(token) for token in (*raw, 300)][:-1] == [7 + at for at in expected]


def test_where_tokens_of_files_begin(byte_level: FileTokenizer, metaspace: FileTokenizer) -> None:
    """`日` is three tokens in both; a blank is part of the token after it."""
    for tokenizer, text, expected in (
        (byte_level, "and 日and and", [0, 3, 4, 4, 4, 5, 8]),
        (metaspace, "and 日a and", [0, 3, 4, 4, 4, 5, 6]),
    ):
        starts = Starts(tokenizer)
        assert [starts.add(token) for token in tokenizer.encode(text).tolist()] == expected
    end = byte_level.token_id("<end>")
    assert end is not None
    a = byte_level.encode("a").tolist()[0]
    for special, expected in ((False, [0, 1, 1]), (True, [0, 1, 6])):
        starts = Starts(byte_level, special)
        assert [starts.add(token) for token in (a, end, a)] == expected


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
def test_bytes_of_tokens_are_those_of_the_text(kind: str, request: pytest.FixtureRequest) -> None:
    """The first token's blank alone is not written by tokenizers that put one before each text."""
    tokenizer: FileTokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode(TEXT).tolist()
    assert len(ids) > len(TEXT), "characters are cut into tokens"
    raw = bytes(byte for token in ids for byte in token_bytes(tokenizer, token))
    assert raw.decode() == (TEXT if kind == "byte_level" else " " + TEXT)
    assert token_bytes(tokenizer, tokenizer.vocab_size) == []


def test_special_tokens(byte_level: FileTokenizer, tmp_path: Path) -> None:
    end = byte_level.token_id("<end>")
    assert end is not None
    silent, loud = Detokenizer(byte_level), Detokenizer(byte_level, special=True)
    assert (silent.add(end), loud.add(end)) == ("", "<end>")


class Across:
    """A tokenizer with tokens of any bytes."""

    special_tokens: tuple[()] = ()

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens, self.vocab_size = tokens, len(tokens)

    def token_bytes(self, token: int) -> bytes:
        return self.tokens[token]

    def decode(self, tokens: Sequence[int], special: bool = False) -> str:
        return b"".join(self.tokens[token] for token in tokens).decode(errors="replace")


@pytest.mark.parametrize("text", ["日本語", "🏳️é🏳️", "a日b本語é"])
def test_a_token_may_end_one_character_and_begin_another(text: str) -> None:
    """Wherever a prompt ends: a character that it begins is the completion's."""
    raw = text.encode()
    for size in range(1, 6):
        for first in range(1, size + 1):
            parts = [raw[:first], *(raw[at : at + size] for at in range(first, len(raw), size))]
            tokenizer: Any = Across(parts)
            for cut in range(len(parts)):
                detokenizer = Detokenizer(tokenizer, before=range(cut))
                found = "".join(map(detokenizer.add, range(cut, len(parts)))) + detokenizer.flush()
                known = b"".join(parts[:cut]).decode(errors="ignore")
                assert known + found == text, (parts, cut)
