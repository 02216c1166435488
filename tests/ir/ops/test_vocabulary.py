"""Embedding and cross entropy over parts of a vocabulary, put together, against torch's on the whole."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from mgraph.ir.opdef import op_def

PARTS, ROWS, WIDTH = 3, 5, 4
VOCAB = PARTS * ROWS


def pieces(tensor: torch.Tensor, dim: int) -> list[torch.Tensor]:
    return list(tensor.chunk(PARTS, dim))


def test_embedding() -> None:
    weight = torch.randn(VOCAB, WIDTH, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(VOCAB, (2, 7))
    body = op_def("embedding_part").body
    found = sum(body(w, tokens, torch.tensor(i)) for i, w in enumerate(pieces(weight.detach(), 0)))
    expected = F.embedding(tokens, weight, padding_idx=6)
    torch.testing.assert_close(found, expected.detach(), rtol=0, atol=0)
    dy = torch.randn_like(expected)
    expected.backward(dy)
    grad = op_def("embedding_part_grad").body
    parts = [grad(dy, tokens, torch.tensor(i), shape=(ROWS, WIDTH), padding_idx=6) for i in range(PARTS)]
    torch.testing.assert_close(torch.cat(parts), weight.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("classes", [0, 13, 8])
def test_cross_entropy(classes: int) -> None:
    """Where some columns are padding, and where all of a part are."""
    logits = 3 * torch.randn(9, VOCAB, dtype=torch.float64)
    logits.requires_grad_()
    real = logits[:, : classes or VOCAB]
    labels = torch.randint(real.shape[1], (9,))
    labels[2] = -100
    expected = F.cross_entropy(real, labels, reduction="sum", ignore_index=-100)
    expected.backward(torch.tensor(0.7, dtype=torch.float64))
    split = pieces(logits.detach(), 1)
    part, join = op_def("cross_entropy_part").body, op_def("cross_entropy_join").body
    made = [part(x, labels, torch.tensor(i), parts=PARTS, classes=classes) for i, x in enumerate(split)]
    lse, picked = (torch.cat(columns, 1) for columns in zip(*made, strict=True))
    total, whole = join(lse, picked, labels)
    torch.testing.assert_close(total, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(whole, real.detach().logsumexp(-1), rtol=1e-12, atol=1e-12)
    grad = op_def("cross_entropy_part_grad").body
    dsum = torch.tensor(0.7, dtype=torch.float64)
    parts = [grad(dsum, x, labels, whole, torch.tensor(i), classes=classes) for i, x in enumerate(split)]
    torch.testing.assert_close(torch.cat(parts, 1), logits.grad, rtol=1e-12, atol=1e-12)
