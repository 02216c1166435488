"""Messages between ranks that share experts of exactly as many rows as there are; the host waits for their number.

T tokens of this rank, n ranks, Q rows that this rank sends, R that it receives.
"""

from __future__ import annotations

import torch
from torch import Tensor


def read_sizes(sent: Tensor, received: Tensor) -> Tensor:
    """How many rows go to each rank and come from each, i64 [2, n], on the CPU, from i64 [n] both; waits for them."""
    return torch.stack([sent, received]).cpu()


def exact_places(places: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """The token of each row that is sent, i64 [Q], by ranks, and the row of each token and rank, i64 [T, n].

    places i64 [T, n]: where a token lies among those that go to a rank, -1 where it does not go, for which its row is
    -1, too. sizes i64 [2, n] on the CPU, of `read_sizes`.
    """
    rows, (count, ranks) = int(sizes[0].sum()), places.shape
    goes = (places >= 0).t().flatten()
    at = goes.cumsum(0) - 1
    tokens = torch.arange(count, device=places.device).repeat(ranks)
    # What goes nowhere is written to a last row, which is cut off.
    order = places.new_empty(rows + 1).scatter_(0, at.where(goes, rows), tokens)[:-1]
    return order, at.where(goes, -1).view(ranks, count).t()
