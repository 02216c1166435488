"""Sampling: distributions, windows, padding, vocabularies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mgraph import philox
from mgraph.errors import DataError
from mgraph.runtime.sample import draw, generate
from mgraph.runtime.tokenizer import ByteTokenizer


def counting(tokens: Tensor) -> Tensor:
    """A causal model that is sure that the next byte is the last plus one."""
    return torch.nn.functional.one_hot((tokens + 1) % 256, 260) * 50.0


def test_greedy_and_sampled_text() -> None:
    tokenizer = ByteTokenizer()
    assert generate(counting, tokenizer, "ab", 4, window=8, temperature=0) == "abcdef"
    assert generate(counting, tokenizer, "ab", 4, window=8, temperature=1.0, top_k=5) == "abcdef"
    assert generate(counting, tokenizer, "ab", 0, window=8) == "ab"
    assert generate(counting, tokenizer, "\x7e", 2, window=8, temperature=0) == "\x7e\x7f\ufffd"


def test_context_slides_and_is_padded_behind() -> None:
    seen: list[list[list[int]]] = []

    def predict(tokens: Tensor) -> Tensor:
        seen.append(tokens.tolist())
        return counting(tokens)

    generate(predict, ByteTokenizer(), "a", 4, window=3, least=(2, 2), temperature=0)
    assert seen == [[[97, 0]] * 2, [[97, 98]] * 2, [[97, 98, 99]] * 2, [[98, 99, 100]] * 2]


def test_context_is_padded_to_a_multiple() -> None:
    lengths: list[int] = []

    def predict(tokens: Tensor) -> Tensor:
        lengths.append(tokens.shape[1])
        return counting(tokens)

    assert generate(predict, ByteTokenizer(), "a", 5, window=4, multiple=2, temperature=0) == "abcdef"
    assert lengths == [2, 2, 4, 4, 4]


def test_seed_decides() -> None:
    def predict(tokens: Tensor) -> Tensor:
        return torch.zeros(*tokens.shape, 256)

    texts = [generate(predict, ByteTokenizer(), "x", 30, window=4, seed=seed) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


def test_padded_vocabulary_is_never_drawn() -> None:
    def predict(tokens: Tensor) -> Tensor:
        logits = torch.zeros(*tokens.shape, 300)
        logits[..., 256:] = 1e9
        logits[..., 65] = 100.0
        return logits

    assert generate(predict, ByteTokenizer(), "x", 5, window=4) == "xAAAAA"


def test_draw_follows_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0], dtype=torch.float64)
    keys = [philox.key_from(0, index) for index in range(1200)]
    for temperature, top_k in ((1.0, 0), (0.5, 0), (1.0, 2), (2.0, 99)):
        counts = torch.bincount(torch.tensor([draw(logits, temperature, top_k, key) for key in keys]), minlength=4)
        scaled = logits / temperature
        if top_k == 2:
            scaled[[0, 2]] = -torch.inf
        torch.testing.assert_close(counts / 1200.0, scaled.softmax(0).float(), rtol=0, atol=0.05)


def test_empty_prompt() -> None:
    with pytest.raises(DataError, match="prompt of the sample is empty"):
        generate(counting, ByteTokenizer(), "", 3, window=8)
