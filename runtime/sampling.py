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


def choose(
    logits: Tensor,
    scores: Tensor,
    keys: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    targets: Tensor,
    *,
    alternatives: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The token of each row with the largest of `keys` [N, V] among those that its cuts leave, its log-probability by
    the logits [N, V], and the likeliest ones.

    Temperature 0 takes the likeliest. Else scores [N, V] are divided by it; of the k largest (and what equals the last
    of them; k 0: all) those are left before which less than top_p of the probability lies, then those at least min_p
    times as probable as the likeliest. Equal scores stand in the order of tokens. Where a target is not negative it is
    taken.
    """
    ordered, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    ordered, cold, classes = ordered.double(), temperature == 0, scores.shape[-1]
    last = torch.where(top_k > 0, top_k.long(), classes).clamp(max=classes)
    mass = ((ordered - ordered[:, :1]) / torch.where(cold, 1.0, temperature.double())[:, None]).exp()
    mass = mass * (ordered >= ordered.gather(1, last[:, None] - 1))
    before = mass.cumsum(-1) - mass
    inside = (before < top_p.double()[:, None] * mass.sum(-1, keepdim=True)) | (before == 0)
    inside = inside & (mass > 0) & (mass >= min_p.double()[:, None] * mass[:, :1])
    place = keys.gather(1, order).masked_fill(~inside, -torch.inf).argmax(-1).masked_fill(cold, 0)
    chosen = torch.where(targets < 0, order.gather(1, place[:, None])[:, 0], targets)
    logprobs = logits - logits.logsumexp(-1, keepdim=True)
    top, ids = logprobs.topk(alternatives, -1)
    return chosen, logprobs.gather(1, chosen[:, None])[:, 0].float(), ids, top.float()


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
    """`perturb` and `choose` at once, as packages of before call them."""
    keys = perturb(scores, temperature, seeds, draws)
    return choose(logits, scores, keys, temperature, top_k, top_p, min_p, targets, alternatives=alternatives)
