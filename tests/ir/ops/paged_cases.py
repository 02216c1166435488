"""Batches of requests over a paged cache, and what attention over them is, position by position in f64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Ragged:
    """New tokens of requests and their cache, filled with random numbers; block 0 and unused rows hold NaN."""

    q: Tensor
    keys: Tensor
    values: Tensor
    starts: Tensor
    lengths: Tensor
    blocks: Tensor
    block_size: int

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """In the order of the op."""
        return self.q, self.keys, self.values, self.starts, self.lengths, self.blocks


def ragged(
    requests: Sequence[tuple[int, int]],
    *,
    heads: int = 4,
    groups: int = 2,
    width: int = 8,
    block_size: int = 4,
    padding: tuple[int, int] = (2, 1),
    table: int = 0,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Ragged:
    """`requests` are (new tokens, tokens in the cache after the step); `padding` how many tokens and requests of it."""
    source = torch.Generator().manual_seed(seed)
    needed = [-(-length // block_size) for _, length in requests]
    total = sum(needed) + 3
    order = (torch.randperm(total - 1, generator=source) + 1).tolist()
    columns = max([table, *needed, 1])
    blocks = torch.zeros(len(requests) + padding[1], columns, dtype=torch.int32)
    cache = torch.full((2, total * block_size, groups, width), float("nan"), dtype=torch.float64)
    for request, (_, length) in enumerate(requests):
        own = [order.pop() for _ in range(needed[request])]
        blocks[request, : len(own)] = torch.tensor(own, dtype=torch.int32)
        for place in range(length):
            row = own[place // block_size] * block_size + place % block_size
            cache[:, row] = torch.randn(2, groups, width, generator=source, dtype=torch.float64)
    new = [count for count, _ in requests]
    q = torch.randn(sum(new) + padding[0], heads, width, generator=source, dtype=torch.float64)
    q[sum(new) :] = float("nan")
    starts = np.concatenate([[0], np.cumsum(new), [sum(new)] * padding[1]])
    lengths = [length for _, length in requests] + [0] * padding[1]
    return Ragged(
        q.to(dtype),
        cache[0].to(dtype).contiguous(),
        cache[1].to(dtype).contiguous(),
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        blocks,
        block_size,
    )


def expected(
    given: Ragged,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Any:
    """f64 [T, H, E], a token and a head at a time."""
    q, keys, values = (t.double().numpy() for t in (given.q, given.keys, given.values))
    out = np.zeros((*q.shape[:2], values.shape[2]))
    per = q.shape[1] // keys.shape[1]
    for request, length in enumerate(given.lengths.tolist()):
        begin, end = given.starts[request : request + 2].tolist()
        for token in range(begin, end):
            position = length - (end - token)
            first = 0 if window is None else max(0, position - window + 1)
            places = range(first, position + 1)
            table = given.blocks[request].tolist()
            rows = [table[p // given.block_size] * given.block_size + p % given.block_size for p in places]
            for head in range(q.shape[1]):
                scores = keys[rows, head // per] @ q[token, head] * scale
                scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
                weights = np.exp(scores - scores.max())
                total = weights.sum()
                if sinks is not None:
                    total += np.exp(float(sinks[head]) - scores.max())
                out[token, head] = weights @ values[rows, head // per] / total
    return torch.from_numpy(out)


MIXED = [(1, 1), (1, 13), (1, 8), (5, 5), (3, 10), (7, 21)]
"""Single tokens, whole prompts and chunks."""
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 3},
    "wide window": {"window": 9},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "all": {"window": 6, "softcap": 2.0, "sinks": True},
}


def variant(name: str, heads: int) -> tuple[dict[str, Any], Tensor | None]:
    """Attributes, and sinks f64 [heads] where there are."""
    attrs = dict(VARIANTS[name])
    sinks = torch.linspace(-1, 2, heads, dtype=torch.float64) if attrs.pop("sinks", False) else None
    return attrs, sinks
