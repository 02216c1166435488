"""Logits to tokens on torch: penalties, cuts of the distribution, and draws that depend on seed and count alone.

N rows of logits, V classes. The noise of a row is a function of its seed and of how many tokens its request has drawn
before, whatever else is in the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mgraph import philox
from mgraph.runtime.ops import wide


def change_scores(
    logits: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    bias: Tensor,
    tokens: Tensor,
    owners: Tensor,
    written: Tensor,
) -> Tensor:
    """Logits [N, V] with the penalties f32 [N] of each row and a bias f32 [N, V].

    Entry i of tokens i64 [K] is one of row owners[i]'s text (N: of none's), and was written by the model where
    written[i]. Logits of tokens of the text are divided by the repetition where positive, multiplied elsewhere; those
    written lose the presence once, and the frequency each time.
    """
    rows, classes = logits.shape
    places = owners * classes + tokens
    present, mine = torch.zeros(2, (rows + 1) * classes, dtype=torch.int32, device=logits.device)
    present.scatter_add_(0, places, torch.ones_like(tokens, dtype=torch.int32))
    mine.scatter_add_(0, places, written.int())
    present, mine = (count.view(rows + 1, classes)[:rows] for count in (present, mine))
    scores, factor = wide(logits), repetition[:, None]
    scores = torch.where(present == 0, scores, torch.where(scores > 0, scores / factor, scores * factor))
    changed: Tensor = scores - presence[:, None] * (mine > 0) - frequency[:, None] * mine + bias
    return changed


def likeliest(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest token i64 [N] of each row, or its target where that is not negative; its log-probability."""
    tokens = torch.where(targets < 0, logits.argmax(-1), targets)
    return tokens, (logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1)).float()


def perturb(scores: Tensor, temperature: Tensor, seeds: Tensor, draws: Tensor) -> Tensor:
    """Scores [N, V] divided by the temperature f32 [N] of their row, with Gumbel noise by seeds and draws i64 [N]; as
    they are where that is 0. f32 [N, V]."""
    scores, cold = wide(scores), (temperature == 0)[:, None]
    scaled = scores / temperature[:, None].masked_fill(cold, 1.0)
    return torch.where(cold, scores, scaled.add_(philox.gumbel_by_row(seeds, draws, scores.shape[-1])))


def cut_keys(scores: Tensor, keys: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """`keys` [N, V] of the tokens that are left of each row, minus infinity for all others.

    Of the k largest of scores [N, V] (and what equals the last of them; k 0: all), divided by the temperature, those
    are left before which less than top_p of the probability lies, then those at least min_p times as probable as the
    likeliest. Equal scores stand in the order of tokens. Where the temperature is 0 all are left.
    """
    ordered, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    ordered, cold, classes = ordered.double(), (temperature == 0)[:, None], scores.shape[-1]
    last = torch.where(top_k > 0, top_k.long(), classes).clamp(max=classes)
    mass = ((ordered - ordered[:, :1]) / temperature.double()[:, None].masked_fill(cold, 1.0)).exp_()
    among = ordered >= ordered.gather(1, last[:, None] - 1)
    mass = mass.masked_fill_(~among, 0.0)
    before, part = mass.cumsum(-1).sub_(mass), top_p.double()[:, None]
    left = among & ((part >= 1) | (before < part * mass.sum(-1, keepdim=True)) | (before == 0))
    left = left & (mass >= min_p.double()[:, None] * mass[:, :1])
    left = torch.zeros_like(left).scatter_(1, order, left)
    return torch.where(left | cold, keys, -torch.inf)


def top_logprobs(logits: Tensor, *, count: int) -> tuple[Tensor, Tensor]:
    """The likeliest tokens i64 [N, count] of each row, the likeliest first, and their log-probabilities f32."""
    top, ids = (logits - logits.logsumexp(-1, keepdim=True)).topk(count, -1)
    return ids, top.float()


def sample(
    logits: Tensor,
    scores: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    draws: Tensor,
    targets: Tensor,
    *,
    alternatives: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All of it at once, as packages of before call it."""
    keys = cut_keys(scores, perturb(scores, temperature, seeds, draws), temperature, top_k, top_p, min_p)
    drawn, _ = likeliest(keys, targets)
    return *likeliest(logits, drawn), *top_logprobs(logits, count=alternatives)
