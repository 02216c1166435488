"""Texts as a server gives them: whole or in a stream, behind their prompts, and where their tokens begin."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models

from mgraph.runtime.serving.engine import Engine
from mgraph.runtime.serving.parameters import SamplingParams
from mgraph.runtime.serving.server import Serving
from mgraph.runtime.tokenizer import FileTokenizer
from tests.runtime.serving.fake_server import running, serving
from tests.runtime.serving.fake_stepper import FakeStepper, alone, spoken_logits
from tests.runtime.serving.test_text import metaspace_in


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("as_text", [False, True])
def test_offsets_are_characters_of_the_text(stream: bool, echo: bool, as_text: bool) -> None:
    spoken = serving(FakeStepper(vocab_size=256, max_length=64, num_blocks=80, logits=spoken_logits("ü日!".encode())))
    prompt = "é x\0"
    asked: Any = {"prompt": prompt if as_text else list(prompt.encode()), "model": "fake", "max_tokens": 8}
    text, offsets = "", []
    with running(spoken) as address, openai.OpenAI(base_url=f"{address}/v1", api_key="any") as client:
        spoken.engine.ends_of_text = ()
        made: Any = client.completions.create(echo=echo, stream=stream, logprobs=0, temperature=0, **asked)
        for chunk in made if stream else [made]:
            text += chunk.choices[0].text
            if chunk.choices[0].logprobs is not None:
                offsets += chunk.choices[0].logprobs.text_offset
    if echo:
        assert text == "é x\0ü日!ü" and offsets == [0, 0, 1, 2, 3, 4, 4, 5, 5, 5, 6, 7, 7]
    else:
        assert text == "ü日!ü" and offsets == [0, 0, 1, 1, 1, 2, 3, 3]


def test_whole_characters_through_a_stream() -> None:
    text = "größer 日本 👩‍🚀 end"
    spoken = serving(FakeStepper(vocab_size=256, max_length=256, num_blocks=80, logits=spoken_logits(text.encode())))
    with running(spoken) as address, openai.OpenAI(base_url=f"{address}/v1", api_key="any") as client:
        parts = [
            chunk.choices[0].text
            for chunk in client.completions.create(
                prompt=[0], max_tokens=100, stop=" end", stream=True, model="fake", temperature=0
            )
        ]
    assert "".join(parts) == "größer 日本 👩‍🚀" and not any("\ufffd" in part for part in parts)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_a_completion_goes_on_where_its_prompt_ends(stream: bool, echo: bool, tmp_path: Path) -> None:
    """By a tokenizer that writes no blank where a text begins; and amid a character. Prompts end with a special token,
    and of two choices each goes on from its own."""
    tokenizer = metaspace_in(tmp_path)
    word, first, *others = tokenizer.encode("and日").tolist()
    for said, prompts, expected in (
        ([word, first, *others], [[word, 0], [0]], [(" and日", [0, 4, 4, 4]), ("and日", [0, 3, 3, 3])]),
        ([*others, word], [[word, first, 0]], [("日 and", [0, 0, 1])]),
    ):
        stepper = FakeStepper(vocab_size=300, max_length=64, num_blocks=80, logits=spoken_logits(said, 300))
        asked: Any = {"prompt": prompts, "model": "fake", "max_tokens": len(said), "n": 2}
        texts, offsets = [""] * 2 * len(prompts), [list[int]() for _ in range(2 * len(prompts))]
        with (
            running(Serving(Engine(stepper, tokenizer), "fake", None)) as address,
            openai.OpenAI(base_url=f"{address}/v1", api_key="any") as client,
        ):
            made: Any = client.completions.create(echo=echo, stream=stream, logprobs=0, temperature=0.01, **asked)
            for choice in [choice for chunk in (made if stream else [made]) for choice in chunk.choices]:
                texts[choice.index] += choice.text
                offsets[choice.index] += [] if choice.logprobs is None else choice.logprobs.text_offset
        for index, (text, places) in enumerate(zip(texts, offsets, strict=True)):
            before = tokenizer.decode(prompts[index // 2], special=True) if echo else ""
            wanted, at = expected[index // 2]
            assert text == before + wanted
            assert places[len(places) - len(at) :] == [len(before) + place for place in at]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_a_character_that_a_prompt_begins_is_given_once(stream: bool, echo: bool) -> None:
    raw = "a日".encode()

    def logits(tokens: Sequence[int]) -> NDArray[np.float64]:
        return np.where(np.arange(256) == raw[len(tokens) % len(raw)], 5.0, -5.0)

    spoken = serving(FakeStepper(vocab_size=256, max_length=64, num_blocks=80, logits=logits))
    asked: Any = {"prompt": list(raw[:2]), "model": "fake", "max_tokens": 2}
    text, offsets = "", []
    with running(spoken) as address, openai.OpenAI(base_url=f"{address}/v1", api_key="any") as client:
        made: Any = client.completions.create(echo=echo, stream=stream, logprobs=0, temperature=0, **asked)
        for chunk in made if stream else [made]:
            text += chunk.choices[0].text
            if chunk.choices[0].logprobs is not None:
                offsets += chunk.choices[0].logprobs.text_offset
    assert (text, offsets) == (("a日", [0, 1, 1, 1]) if echo else ("日", [0, 0]))


def test_a_library_that_panics_ends_one_request(tmp_path: Path) -> None:
    """The text of a token that is empty, where the decoder strips it: tokenizers raises what is no Exception."""
    vocab = {"" if at == 7 else chr(0x100 + at): at for at in range(64)}
    library = Library(models.WordLevel(vocab, unk_token=chr(0x100)))
    library.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = FileTokenizer(tmp_path)
    stepper = FakeStepper(vocab_size=64, num_blocks=400, max_length=256, max_requests=8, max_tokens=64)
    ends: dict[str, str | None] = {}
    with (
        running(Serving(Engine(stepper, tokenizer), "fake", None)) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0) as client,
    ):

        def asking(name: str, bias: int) -> None:
            asked: Any = {"prompt": [1, 2], "model": "fake", "max_tokens": 20, "logit_bias": {"7": bias}}
            try:
                ends[name] = client.completions.create(**asked).choices[0].finish_reason
            except openai.APIStatusError as error:
                ends[name] = error.message

        threads = [threading.Thread(target=asking, args=one) for one in (("innocent", -100), ("empty", 100))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert ends["innocent"] == "length"
    assert "the tokenizer" in str(ends["empty"]) and "has failed" in str(ends["empty"])


def test_without_a_tokenizer_tokens_are_ids() -> None:
    served = Serving(Engine(FakeStepper(), None), "fake", None)
    prompt = [1, 5]
    (first, *_), _ = alone(FakeStepper().logits, prompt, SamplingParams(temperature=0), 4)
    with running(served) as address, openai.OpenAI(base_url=f"{address}/v1", api_key="any") as client:
        asked: Any = {"model": "fake", "max_tokens": 4, "temperature": 0, "logprobs": 2, "echo": True}
        scores = client.completions.create(prompt=prompt, **asked).choices[0].logprobs
        with pytest.raises(openai.BadRequestError, match="no tokenizer"):
            client.completions.create(prompt="text", model="fake")
        with pytest.raises(openai.BadRequestError, match="no tokenizer"):
            client.chat.completions.create(messages=[{"role": "user", "content": "hi"}], model="fake")
    assert scores is not None and scores.tokens is not None and scores.top_logprobs is not None
    assert scores.tokens[:3] == ["token_id:1", "token_id:5", f"token_id:{first}"] and len(scores.tokens) == 6
    assert f"token_id:{first}" in scores.top_logprobs[2] and len(scores.top_logprobs[2]) == 2
