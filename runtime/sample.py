"""Let the model write: draw token after token from its `predict` entry.

The whole context is run again for each token; where it grows longer than the window the model was trained on, its
beginning slides out. Draws come from the counter-based generator, so the same seed writes the same text on every rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mgraph import philox
from mgraph.errors import DataError
from mgraph.runtime.tokenizer import Tokenizer


def generate(
    predict: Callable[[Tensor], Tensor],
    tokenizer: Tokenizer,
    prompt: str,
    length: int,
    *,
    window: int,
    least: tuple[int, int] = (1, 1),
    multiple: int = 1,
    seed: int = 0,
    temperature: float = 1.0,
    top_k: int = 0,
    device: torch.device | str = "cpu",
) -> str:
    """The prompt and `length` tokens after it, as text.

    `predict` takes tokens i64[B, S] to logits [B, S, V]; the model must be causal. `window` is the longest context and
    `least` the smallest (B, S) that predict takes, of which S is a multiple of `multiple`: other contexts are padded
    behind, where a causal model does not look. Temperature 0 takes the likeliest token.
    """
    ids: list[int] = tokenizer.encode(prompt).tolist()
    if not ids:
        raise DataError("the prompt of the sample is empty", hint="--sample-prompt TEXT with at least one token")
    rows, shortest = least
    for index in range(length):
        context = ids[-window:]
        padded = context + [0] * (shortest - len(context))
        padded += [0] * (-len(padded) % multiple)
        tokens = torch.tensor([padded] * rows, dtype=torch.int64, device=device)
        logits = predict(tokens)[0, len(context) - 1].double().cpu()
        # A model's vocabulary may be padded; ids that the tokenizer does not know are never drawn.
        ids.append(draw(logits[: tokenizer.vocab_size], temperature, top_k, philox.key_from(seed, "sample", index)))
    return tokenizer.decode(ids)


def draw(logits: Tensor, temperature: float, top_k: int, key: philox.Key) -> int:
    """One token id from logits f64[V], among the `top_k` likeliest (0: all), by inversion of the cumulative sum."""
    if temperature == 0:
        return int(logits.argmax())
    values, ids = logits.topk(min(top_k, len(logits)) if top_k else len(logits))
    cumulative = torch.softmax(values / temperature, dim=0).cumsum(0)
    point = philox.uniform((1,), key, dtype=torch.float64) * cumulative[-1]
    return int(ids[torch.searchsorted(cumulative, point, right=True).clamp(max=len(ids) - 1)])
