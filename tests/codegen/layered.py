"""Small models whose layers give more than they hand on, or read parts of what all share: loops of step.py must do as
the statements one by one. Each has a factory of its name in lower case."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

WIDTH = 32
LAYERS = 4


class Output(NamedTuple):
    """Logits, and a loss to add to the mean one."""

    logits: Tensor
    aux_loss: Tensor


class Layer(nn.Module):
    """One layer, and eight numbers of each token."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.norm(x)
        return x + self.down(torch.tanh(self.up(normed))), self.gate(normed)


class Model(nn.Module):
    """What all have."""

    def __init__(self, layer: Callable[[], nn.Module] = Layer, layers: int = LAYERS) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 64)


class Running(Model):
    """Losses that are added up on the way."""

    def forward(self, tokens: Tensor) -> Output:
        x, loss = self.embed(tokens), torch.zeros(())
        for layer in self.layers:
            x, gate = layer(x)
            loss = gate.square().mean() + loss
        return Output(self.head(x), loss)


class Turned(Model):
    """A view of what goes into the first layer is read after the last."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        view = x.transpose(1, 2)
        for layer in self.layers:
            x, _ = layer(x)
        made: Tensor = self.head(torch.matmul(x, view).softmax(-1) @ x)
        return made


def running() -> nn.Module:
    return Running()


def turned() -> nn.Module:
    return Turned()
