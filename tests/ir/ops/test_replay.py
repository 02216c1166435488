"""Weights of any choice against their formulas, values and gradients; what is given against what was chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mgraph.ir.opdef import op_def
from mgraph.ir.ops.route import moe_route

TOKENS, EXPERTS, CHOICES = 7, 6, 3


def weights(logits: Tensor, indices: Tensor, score: str, renormalize: bool, scale: float) -> Tensor:
    rows = []
    for row, chosen in zip(logits, indices, strict=True):
        if score == "softmax_chosen":
            made = row[chosen].exp() / row[chosen].exp().sum()
        else:
            made = (row.exp() / row.exp().sum() if score == "softmax" else 1 / (1 + (-row).exp()))[chosen]
        rows.append(scale * (made / (made.sum() + 1e-3) if renormalize else made))
    return torch.stack(rows)


@pytest.mark.parametrize("score", ["softmax", "softmax_chosen", "sigmoid"])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_weights_of_any_choice(check_op: Any, score: str, renormalize: bool, scale: float) -> None:
    logits = torch.randn(TOKENS, EXPERTS, requires_grad=True)
    indices = torch.rand(TOKENS, EXPERTS).topk(CHOICES).indices
    attrs = {"score": score, "renormalize": renormalize, "scale": scale, "epsilon": 1e-3}
    check_op("moe_weigh", (logits, indices), attrs, lambda x, i: weights(x, i, score, renormalize, scale))


def test_of_its_own_choice_they_are_the_routers() -> None:
    logits = torch.randn(TOKENS, EXPERTS)
    given, indices = moe_route(logits, top_k=CHOICES, renormalize=True)
    assert torch.equal(op_def("moe_weigh").body(logits, indices, renormalize=True), given)


def test_what_is_given_takes_the_place_of_what_was_chosen() -> None:
    chosen = torch.tensor([[0, 1], [2, 3]])
    given = torch.tensor([[-1, -1], [5, 4]], dtype=torch.int16)
    assert op_def("replay_choice").body(chosen, given).tolist() == [[0, 1], [5, 4]]


def test_layers_come_apart_and_together() -> None:
    layers = torch.arange(2 * 5 * 3, dtype=torch.int16).view(2, 5, 3)
    first, rest = op_def("first_layer").body(layers)
    second, none = op_def("first_layer").body(rest)
    assert none.shape == (0, 5, 3)
    stacked = op_def("stack_choices").body(second, first, layers=("a", "b"), experts=(9, 9))
    assert torch.equal(stacked, layers.transpose(0, 1))
