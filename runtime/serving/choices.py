"""How rows of logits become tokens: which entry of the package does what they ask for, and what that is handed.

The entries are those of `mgraph/passes/serve_entries.py`, each of which does what the ones before it do, and more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mgraph.runtime.invariant import fixed_shapes
from mgraph.runtime.serving.step import I64, MOST_ALTERNATIVES, Sampling

PENALTIES = ("repetition", "presence", "frequency")
"""Inputs that `sample_changed` has besides those of `sample`; then come a bias and the tokens of penalised texts."""


class Sampler(StrEnum):
    """An entry that makes tokens of logits, the cheapest first."""

    NONE = "none"
    """There is no row."""
    LIKELIEST = "likeliest"
    DRAW = "draw"
    """Of all tokens."""
    CUT = "draw_cut"
    SAMPLE = "sample"
    CHANGED = "sample_changed"


_CHOICE = ("temperature", "top_k", "top_p", "min_p", "seeds", "draws", "targets")
INPUTS = {
    Sampler.LIKELIEST: ("targets",),
    Sampler.DRAW: ("temperature", "seeds", "draws", "targets"),
    Sampler.CUT: _CHOICE,
    Sampler.SAMPLE: _CHOICE,
    Sampler.CHANGED: (*_CHOICE, *PENALTIES),
}
"""The inputs of an entry that are numbers of rows, in order."""


def sampler_of(sampling: Sampling) -> Sampler:
    """The cheapest entry that does what all rows ask for."""
    if not len(sampling.targets):
        return Sampler.NONE
    if sampling.prompts is not None or sampling.bias is not None:
        return Sampler.CHANGED
    if sampling.alternatives:
        return Sampler.SAMPLE
    drawn = (sampling.temperature != 0) & (sampling.targets < 0)
    cut = (sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)
    if (drawn & cut).any():
        return Sampler.CUT
    return Sampler.DRAW if drawn.any() else Sampler.LIKELIEST


def inputs_of_sample(sampler: Sampler, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """The inputs of `draw` or `draw_cut` as those of `sample`, for packages of before, which lack these."""
    if sampler is Sampler.CUT:
        return inputs
    logits, temperature, *others = inputs
    zero, one = torch.zeros_like(temperature), torch.ones_like(temperature)
    return logits, temperature, zero.int(), one, zero, *others


def text_of(sampling: Sampling) -> tuple[I64, I64, NDArray[np.bool_]]:
    """Tokens of penalised texts one after the other, the row of each, and whether the model wrote it.

    The first is no token of any: its row is N.
    """
    rows = len(sampling.targets)
    tokens, owners, written = [np.zeros(1, np.int64)], [np.full(1, rows)], [np.zeros(1, bool)]
    for texts, mine in ((sampling.prompts, False), (sampling.outputs, True)):
        for row, text in enumerate(texts or ()):
            tokens.append(text)
            owners.append(np.full(len(text), row))
            written.append(np.full(len(text), mine))
    return np.concatenate(tokens), np.concatenate(owners), np.concatenate(written)


def text_length(sampling: Sampling) -> int:
    """The length of `text_of`."""
    return 1 + sum(len(text) for texts in (sampling.prompts, sampling.outputs) for text in texts or ())


def called(
    call: Callable[..., Sequence[Tensor]],
    sampler: Sampler,
    logits: Tensor,
    given: Sequence[Tensor],
    padding_from: int | None,
) -> Sequence[Tensor]:
    """The results of an entry for logits [N, V], with tokens below `padding_from`; log-probabilities are those of all
    logits.

    Logits beyond are taken out of their place and put back: they are few, and a copy of all would cost more.
    """
    if padding_from is None or padding_from >= logits.shape[1]:
        return call(sampler, logits, *given)
    beyond = logits[:, padding_from:]
    kept = beyond.clone()
    beyond.fill_(-torch.inf)
    tokens, _, *tops = call(sampler, logits, *given)
    beyond.copy_(kept)
    return [*call(Sampler.LIKELIEST, logits, tokens), *tops]


def with_all(results: Sequence[Tensor], logits: Tensor, sampling: Sampling, batch_invariant: bool) -> Sequence[Tensor]:
    """Results of rows that ask for more of the likeliest tokens than the entries give, or for any where these leave
    some tokens out: with all of them in order, and their log-probabilities computed as the entries do it."""
    left_out = sampling.padding_from is not None and sampling.padding_from < logits.shape[1]
    if sampling.alternatives <= (0 if left_out else MOST_ALTERNATIVES):
        return results
    with fixed_shapes(batch_invariant):
        top, ids = (logits - logits.logsumexp(-1, keepdim=True)).sort(dim=-1, descending=True, stable=True)
    return [*results[:2], ids, top]


def sampled(
    call: Callable[..., Sequence[Tensor]],
    logits: Tensor,
    sampling: Sampling,
    on_device: Callable[[Any], Tensor],
    known: Callable[[Tensor], Tensor],
    batch_invariant: bool = False,
) -> Sequence[Tensor]:
    """The results of the entry for logits [N, V], launched op by op; `known` fills in unknown tokens of the text."""
    sampler = sampler_of(sampling)
    given = [on_device(getattr(sampling, name)) for name in INPUTS[sampler]]
    if sampler is Sampler.CHANGED:
        given.append(logits.new_zeros(logits.shape) if sampling.bias is None else on_device(sampling.bias))
        tokens, owners, written = (on_device(array) for array in text_of(sampling))
        given += [known(tokens), owners, written]
    return with_all(called(call, sampler, logits, given, sampling.padding_from), logits, sampling, batch_invariant)
