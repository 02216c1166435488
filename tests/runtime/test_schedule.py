"""The learning rate against torch's schedulers and at its corners."""

from __future__ import annotations

import pytest
import torch

from mgraph.runtime.schedule import learning_rate


def rates(steps: int, warmup: int, decay: str) -> list[float]:
    return [learning_rate(step, steps, peak=1.0, minimum=0.1, warmup=warmup, decay=decay) for step in range(steps)]


def test_warmup_starts_above_zero_and_reaches_the_peak() -> None:
    assert rates(10, 4, "constant") == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("decay", ["cosine", "linear"])
def test_decay_equals_torch(decay: str) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scheduler: torch.optim.lr_scheduler.LRScheduler
    if decay == "cosine":
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=16, eta_min=0.1)
    else:
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=16)
    expected = []
    for _ in range(17):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates(20, 3, decay)[3:] == pytest.approx(expected)


@pytest.mark.parametrize("decay", ["cosine", "linear"])
def test_awkward_lengths(decay: str) -> None:
    assert rates(1, 0, decay) == [1.0]
    assert rates(3, 10, decay) == pytest.approx([0.1, 0.2, 0.3])  # the run ends within its warm-up
    assert rates(4, 3, decay)[-1] == pytest.approx(1.0)  # one step is left: it has the peak
    assert rates(50, 5, decay)[-1] == pytest.approx(0.1)
