"""Logits to tokens on torch: penalties, cuts of the distribution, and draws that depend on seed and count alone.

N rows of logits, V classes. The random number of a row is a function of its seed and of how many tokens its request has
drawn before, whatever else is in the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mgraph import philox
from mgraph.runtime.ops import wide

_WORD = 0xFFFFFFFF


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


def uniform(seeds: Tensor, draws: Tensor) -> Tensor:
    """f64 [N] in [0, 1): 53 bits of the block with counter `draws` under the key `seeds`, both i64 [N]."""
    key = seeds & _WORD, (seeds >> 32) & _WORD
    counter = draws & _WORD, (draws >> 32) & _WORD, torch.zeros_like(draws), torch.zeros_like(draws)
    high, low, _, _ = philox.philox4x32(counter, key)
    return (high * 2**21 + (low >> 11)).double() * 2.0**-53


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
    """A token of each row drawn by its scores [N, V], its log-probability by the logits [N, V], and the likeliest ones.

    Temperature 0 takes the likeliest. Else scores are divided by it; of the k largest (and what equals the last of
    them; k 0: all) those are left before which less than top_p of the probability lies, then those at least min_p times
    as probable as the likeliest. Equal scores stand in the order of tokens. Where a target is not negative it is taken.
    """
    ordered, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    ordered, cold, classes = ordered.double(), temperature == 0, scores.shape[-1]
    last = torch.where(top_k > 0, top_k.long(), classes).clamp(max=classes)
    mass = ((ordered - ordered[:, :1]) / torch.where(cold, 1.0, temperature.double())[:, None]).exp()
    mass = mass * (ordered >= ordered.gather(1, last[:, None] - 1))
    before = mass.cumsum(-1) - mass
    inside = (before < top_p.double()[:, None] * mass.sum(-1, keepdim=True)) | (before == 0)
    mass = mass * (inside & (mass >= min_p.double()[:, None] * mass[:, :1]))
    total = mass.cumsum(-1)
    point = uniform(seeds, draws)[:, None] * total[:, -1:]
    place = torch.where(cold, 0, (total <= point).sum(-1).clamp(max=classes - 1))
    chosen = torch.where(targets < 0, order.gather(1, place[:, None])[:, 0], targets)
    logprobs = logits - logits.logsumexp(-1, keepdim=True)
    top, ids = logprobs.topk(alternatives, -1)
    return chosen, logprobs.gather(1, chosen[:, None])[:, 0].float(), ids, top.float()
