"""How logits become tokens, against numpy; what is drawn has the right frequencies and depends on its request alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from mgraph.ir.opdef import op_def
from mgraph.runtime import v1 as rt

ROWS, CLASSES = 6, 40


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox-4x32-10 of its paper, with Python's integers."""
    c, k, mask = list(counter), list(key), 2**32 - 1
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) ^ c[1] ^ k[0], b & mask, (a >> 32) ^ c[3] ^ k[1], a & mask]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return c


def noise(seed: int, draws: int, token: int) -> float:
    """-log(-log(1 - v)) in Python's doubles, v of the token's word."""
    block = token // 4096 * 1024 + token % 1024
    words = philox([block, draws & (2**32 - 1), draws >> 32, 0], [seed & (2**32 - 1), seed >> 32])
    v = min((words[token // 1024 % 4] + 0.5) / 2**32, 1 - 2**-24)
    return -math.log(-math.log1p(-v))


def drawn(scores: Any, temperature: float, top_k: int, top_p: float, min_p: float, seeds: int, draws: int) -> int:
    """The token of one row: sort, cut, and take the largest with noise."""
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    if temperature == 0:
        return order[0]
    scaled = np.array([scores[i] for i in order], np.float64) / np.float64(np.float32(temperature))
    weights = np.exp(scaled - scaled[0])
    if top_k:
        weights[scaled < scaled[min(top_k, len(order)) - 1]] = 0
    kept, total, before = np.zeros_like(weights), weights.sum(), 0.0
    for i, weight in enumerate(weights):
        if i == 0 or before < float(np.float32(top_p)) * total:
            kept[i] = weight
        before += weight
    kept[kept < float(np.float32(min_p)) * kept[0]] = 0
    keys = [scaled[i] + noise(seeds, draws, token) for i, token in enumerate(order)]
    return order[max((i for i in range(len(order)) if kept[i]), key=keys.__getitem__)]


def choices(seed: int, rows: int = ROWS) -> dict[str, torch.Tensor]:
    source = np.random.default_rng(seed)
    return {
        "temperature": torch.tensor(source.choice([0.0, 0.5, 1.0, 2.0], rows), dtype=torch.float32),
        "top_k": torch.tensor(source.choice([0, 1, 3, 100], rows), dtype=torch.int32),
        "top_p": torch.tensor(source.choice([1.0, 0.9, 0.3, 1e-6], rows), dtype=torch.float32),
        "min_p": torch.tensor(source.choice([0.0, 0.05, 0.4], rows), dtype=torch.float32),
        "seeds": torch.tensor(source.integers(0, 2**62, rows)),
        "draws": torch.tensor(source.integers(0, 5000, rows)),
        "targets": torch.full((rows,), -1),
    }


@pytest.mark.parametrize("body", [op_def("sample").body, rt.sample], ids=["meaning", "runtime"])
@pytest.mark.parametrize("seed", range(8))
def test_tokens_and_log_probabilities_are_those_of_numpy(body: Any, seed: int) -> None:
    logits = torch.from_numpy(np.random.default_rng(100 + seed).normal(0, 2, (ROWS, CLASSES))).float()
    logits[0, 5] = logits[0, 9] = logits[0].max() + 1  # equal ones
    logits[1, 7] = -float("inf")
    given = choices(seed)
    given["targets"][2] = 11
    tokens, logprobs, ids, top = body(logits, logits, *given.values(), alternatives=4)
    exact = logits.double().log_softmax(-1)
    for row in range(ROWS):
        numbers: dict[str, Any] = {name: values[row].item() for name, values in given.items() if name != "targets"}
        found = drawn(logits[row].tolist(), **numbers)
        assert int(tokens[row]) == (11 if row == 2 else found)
        assert abs(float(logprobs[row]) - float(exact[row, tokens[row]])) < 1e-5
        torch.testing.assert_close(top[row].double(), exact[row].topk(4).values, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(exact[row, ids[row]], exact[row].topk(4).values)


def test_a_row_does_not_depend_on_its_batch() -> None:
    logits, given = torch.randn(ROWS, CLASSES), choices(1)
    together = rt.sample(logits, logits, *given.values(), alternatives=3)
    for row in range(ROWS):
        alone = rt.sample(logits[[row]], logits[[row]], *(v[[row]] for v in given.values()), alternatives=3)
        assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, together, strict=True))


def test_all_tokens_are_drawn_alike_with_cuts_that_cut_nothing() -> None:
    """A request gets what it gets, whether others in its step have cuts or not."""
    logits, given = 3 * torch.randn(ROWS, 5000), choices(3)
    given |= {"top_k": torch.full((ROWS,), 5000).int(), "top_p": torch.ones(ROWS), "min_p": torch.zeros(ROWS)}
    tokens, logprobs, _, _ = rt.sample(logits, logits, *given.values(), alternatives=2)
    keys = rt.perturb(logits, given["temperature"], given["seeds"], given["draws"])
    drawn_, _ = rt.likeliest(keys, given["targets"])
    assert torch.equal(drawn_, tokens)
    torch.testing.assert_close(rt.likeliest(logits, drawn_)[1], logprobs)


def test_noise_is_that_of_each_token() -> None:
    """In rows of more than one stretch of each lane, by seeds and draws beyond 32 bits; alone and among others."""
    seeds, draws = torch.tensor([2**61 + 12345, 7]), torch.tensor([2**33 + 1, 0])
    made = rt.perturb(torch.zeros(2, 9001), torch.ones(2), seeds, draws)
    for row in range(2):
        for token in (0, 1, 1023, 1024, 3072, 4095, 4096, 5120, 9000):
            wanted = noise(int(seeds[row]), int(draws[row]), token)
            assert abs(float(made[row, token]) - wanted) < 1e-5 * max(1.0, abs(wanted))
    assert torch.equal(made[1:], rt.perturb(torch.zeros(1, 9001), torch.ones(1), seeds[1:], draws[1:]))
    assert bool(made.isfinite().all())


@pytest.mark.parametrize("cut", [False, True])
def test_frequencies_are_the_probabilities(cut: bool) -> None:
    """Chi-square of 20,000 draws of one request over 8 classes, or over the 5 that a cut leaves: 99.9 % quantiles with
    7 and 4 degrees of freedom."""
    count = 20_000
    row = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, 1.5, -2.0])
    logits = row.expand(count, -1)
    ones, none = torch.ones(count), torch.zeros(count)
    seeds, draws = torch.full((count,), 123456789), torch.arange(count)
    top_k = none.int() + 5 * cut
    tokens, *_ = rt.sample(logits, logits, ones, top_k, ones, none, seeds, draws, none.long() - 1, alternatives=1)
    left = torch.full_like(row, -torch.inf).scatter(0, row.topk(5 if cut else 8).indices, 0.0)
    wanted = (row + left).double().softmax(0) * count
    found = tokens.bincount(minlength=8).double()
    assert not found[wanted == 0].any()
    chi = ((found - wanted) ** 2 / wanted)[wanted > 0].sum()
    assert float(chi) < (18.5 if cut else 24.3)


@pytest.mark.parametrize("body", [op_def("change_scores").body, rt.change_scores], ids=["meaning", "runtime"])
def test_penalties_are_those_of_a_loop(body: Any) -> None:
    logits = torch.randn(3, 10, dtype=torch.float32)
    repetition, presence, frequency = torch.tensor([1.0, 1.5, 2.0]), torch.tensor([0.0, 0.3, -0.2]), torch.rand(3)
    bias = torch.zeros(3, 10)
    bias[2, 4] = -float("inf")
    tokens = torch.tensor([1, 1, 2, 3, 3, 3, 7, 0])
    owners, written = torch.tensor([0, 0, 1, 1, 1, 1, 2, 3]), torch.tensor([0, 1, 0, 1, 1, 0, 1, 1]).bool()
    wanted = logits.clone()
    for row in range(3):
        text = [(int(t), bool(w)) for t, o, w in zip(tokens, owners, written, strict=True) if int(o) == row]
        for token in {t for t, _ in text}:
            value, times = wanted[row, token], sum(w for t, w in text if t == token)
            value = value / repetition[row] if value > 0 else value * repetition[row]
            wanted[row, token] = value - frequency[row] * times - presence[row] * (times > 0)
        wanted[row] += bias[row]
    made = body(logits, repetition, presence, frequency, bias, tokens, owners, written)
    torch.testing.assert_close(made, wanted)


@pytest.mark.parametrize("body", [op_def("likeliest").body, rt.likeliest], ids=["meaning", "runtime"])
def test_the_likeliest_token_or_the_target(body: Any) -> None:
    logits = torch.randn(4, 30)
    tokens, logprobs = body(logits, torch.tensor([-1, -1, 8, -1]))
    wanted = logits.argmax(-1)
    wanted[2] = 8
    assert torch.equal(tokens, wanted)
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).gather(1, wanted[:, None])[:, 0])
