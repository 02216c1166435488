"""Rows of scores with cuts of all kinds, and what a kernel may leave of them."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from mgraph.codegen.triton.likeliest import Likeliest
from mgraph.ir.opdef import op_def

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
CUTS = (  # temperature, top_k, top_p, min_p
    (1.0, 0, 1.0, 0.0),
    (0.0, 3, 0.5, 0.5),
    (1.0, 1, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (1.0, 10**6, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (2.0, 0, 0.3, 0.0),
    (0.5, 0, 1e-6, 0.0),
    (1.0, 0, 0.0, 0.0),
    (1.0, 0, 1.0, 0.05),
    (1.0, 0, 1.0, 1.0),
    (1.3, 50, 0.8, 0.01),
    (1e-3, 50, 0.8, 0.01),
    (50.0, 0, 0.99, 0.0),
    (1.0, 0, 0.999999, 0.0),
)


def draw(problem: Likeliest, seed: int, times: int = 1) -> tuple[Tensor, ...]:
    """Scores of both signs, with many equals in bf16 and by hand, zeros of both signs, and what is masked away: rows of
    all cuts, so many times."""
    rows, source = times * len(CUTS), torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(rows, problem.classes, generator=source)
    scores[::3, ::2] = scores[::3, 1:2].expand_as(scores[::3, ::2])
    scores[:, 0], scores[:, -1] = 0.0, -0.0
    scores[5:8, problem.classes // 2 :] = -torch.inf
    keys = torch.randn(rows, problem.classes, generator=source)
    temperature, top_k, top_p, min_p = map(torch.tensor, zip(*CUTS * times, strict=True))
    return scores.to(DTYPES[problem.dtype]), keys, temperature, top_k.int(), top_p, min_p


def check(made: Tensor, given: tuple[Tensor, ...], name: str) -> None:
    """The same tokens are left, but for one, or some of next to no probability, at the edge where the rounding of sums
    may decide; and keys are theirs."""
    wanted = op_def("cut_keys").body(*given)
    left, expected = made > -torch.inf, wanted > -torch.inf
    assert torch.equal(made[left], given[1][left]), name
    for row, (_, cut) in enumerate(zip(made, itertools.cycle(CUTS))):
        off = left[row] != expected[row]
        chances = (given[0][row].double() / (cut[0] or 1.0)).softmax(0)
        most = 1 if cut[2] < 1.0 or cut[3] > 0.0 else 0
        wrong = f"{name}, {cut}: {off.nonzero()[:5, 0].tolist()}"
        assert int(off.sum()) <= most or (most and float(chances[off].sum()) < 3e-6), wrong
    alike = (left == expected).all(1).double().mean()
    assert float(alike) > 0.85, f"{name}: rounding decides in few rows"
