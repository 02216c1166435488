"""Small models whose layers give more than they hand on, or read parts of what all share: loops of step.py must do as
the statements one by one. Each has a factory of its name in lower case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mgraph import models
from mgraph.models.config import ModelConfig
from mgraph.models.custom_router import use_router
from mgraph.models.decoder import Block, Decoder

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


class LosingLayer(Layer):
    """With two losses."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        y, gate = super().forward(x)
        return y, gate.square().mean(), gate.logsumexp(-1).square().mean()


class Model(nn.Module):
    """What all have."""

    def __init__(self, layer: Callable[[], nn.Module] = Layer, layers: int = LAYERS) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 64)


class Two(Model):
    """Two losses of each layer, each in a list."""

    def forward(self, tokens: Tensor) -> Output:
        x, first, second = self.embed(tokens), [], []
        for layer in self.layers:
            x, one, other = layer(x)
            first.append(one)
            second.append(other)
        return Output(self.head(x), torch.stack(first).sum() + torch.stack(second).mean())


class Summed(Model):
    """Losses that are added up one by one after the layers."""

    def forward(self, tokens: Tensor) -> Output:
        x, losses = self.embed(tokens), []
        for layer in self.layers:
            x, gate = layer(x)
            losses.append(gate.square().mean())
        total = losses[0]
        for loss in losses[1:]:
            total = total + loss
        return Output(self.head(x), total)


class Running(Model):
    """Losses that are added up on the way."""

    def forward(self, tokens: Tensor) -> Output:
        x, loss = self.embed(tokens), torch.zeros(())
        for layer in self.layers:
            x, gate = layer(x)
            loss = gate.square().mean() + loss
        return Output(self.head(x), loss)


class Rows(Model):
    """Numbers of the tokens of all layers in one tensor: not small, so a list may not hold them."""

    def forward(self, tokens: Tensor) -> Output:
        x, gates = self.embed(tokens), []
        for layer in self.layers:
            x, gate = layer(x)
            gates.append(gate.reshape(-1, 8))
        return Output(self.head(x), torch.cat(gates).softmax(-1).square().mean())


class Hidden(Model):
    """What goes from layer to layer, of all of them: a list would hold what the backward pops from another."""

    def forward(self, tokens: Tensor) -> Output:
        x, hidden = self.embed(tokens), []
        for layer in self.layers:
            x, _ = layer(x)
            hidden.append(x)
        return Output(self.head(x), torch.stack(hidden).square().mean())


class Growing(Model):
    """Each layer reads a wider part of what all share: no iteration of a loop is like another."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        first = x
        for i, layer in enumerate(self.layers):
            y, gate = layer(x)
            x = y + (gate.sum(-1, keepdim=True).sigmoid() * first[:, :, : i + 1]).sum(-1, keepdim=True)
        logits: Tensor = self.head(x)
        return logits


class Apart(Model):
    """The same, read one after the other: a list would hold them all for too long."""

    def forward(self, tokens: Tensor) -> Tensor:
        x, total = self.embed(tokens), 0.0
        hidden = []
        for layer in self.layers:
            x, _ = layer(x)
            hidden.append(x)
        for one in hidden:
            total = total + one * 0.5
        made: Tensor = self.head(total)
        return made


class Scaled(Model):
    """A number for each layer out of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.ones(LAYERS))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for index, layer in enumerate(self.layers):
            y, _ = layer(x)
            x = x + self.scales[index] * (y - x)
        made: Tensor = self.head(x)
        return made


class Parts(Model):
    """Part of a tensor for each layer, and of what goes into the first."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = first = self.embed(tokens)
        for index, layer in enumerate(self.layers):
            x, _ = layer(x * first[:, :1, index : index + 1])
        made: Tensor = self.head(x)
        return made


class Turned(Model):
    """A view of what goes into the first layer is read after the last."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        view = x.transpose(1, 2)
        for layer in self.layers:
            x, _ = layer(x)
        made: Tensor = self.head(torch.matmul(x, view).softmax(-1) @ x)
        return made


class Later(Model):
    """What each iteration could write over is read of the last, after the layers."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = gate = self.embed(tokens)
        for layer in self.layers:
            x, gate = layer(x)
            gate = gate.exp()
            x = x + (gate * 2).sum(-1, keepdim=True)
        return torch.cat([self.head(x), gate], -1)


class Both(Model):
    """Layers of two lists by turns; a view of what an iteration began with is read at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed(tokens)
        for first, second in zip(self.layers, self.second, strict=True):
            view = x.transpose(1, 2)
            z, _ = second(first(x)[0])
            x = z + torch.matmul(torch.matmul(z, view), z) * 0.01
        made: Tensor = self.head(x)
        return made


class TwoBecomeOne(Both):
    """Two values before the layers, of which each layer makes one."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        other = x * 0.5 + 1
        for first, second in zip(self.layers, self.second, strict=True):
            z, _ = second(first(x)[0])
            x = other = z + other
        made: Tensor = self.head(x)
        return made


class Looking(Model):
    """A view of what goes into a layer is read before it or, `late`, once the layer has given what goes on."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.late = late

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        total = x * 0.5
        for layer in self.layers:
            view = x.transpose(1, 2)
            if not self.late:
                total = total + (view * 2.0).transpose(1, 2)
            x, _ = layer(x)
            if self.late:
                total = total + (view * 2.0).transpose(1, 2)
        made: Tensor = self.head(x + total)
        return made


class AskedTwice(Model):
    """Each layer runs twice on the same, and gives the same twice."""

    def forward(self, tokens: Tensor) -> Output:
        x, losses = self.embed(tokens), []
        for layer in self.layers:
            (y, gate), (z, again) = layer(x), layer(x)
            x = y + z
            losses += [gate.mean(), again.mean()]
        return Output(self.head(x), torch.stack(losses).sum())


class Summing(Model):
    """After each layer one that ranks share along `tp`: its sum over them is made in place."""

    def __init__(self) -> None:
        super().__init__()
        wide = (nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH, bias=False)) for _ in range(LAYERS))
        self.wide = nn.ModuleList(wide)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer, wide in zip(self.layers, self.wide, strict=True):
            x = wide(layer(x)[0])
        made: Tensor = self.head(x)
        return made


class Mixed(Decoder):
    """A decoder in which layers of `kinds` d are dense, and those of m have experts."""

    def __init__(self, config: ModelConfig, kinds: str) -> None:
        super().__init__(replace(config, num_layers=len(kinds)))
        dense = replace(self.config, num_experts=0, balance_loss=0.0, z_loss=0.0)
        self.layers = nn.ModuleList(Block(dense if kind == "d" else self.config) for kind in kinds)


class Router(nn.Module):
    """A router with a loss of its own."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.proj = nn.Linear(config.d_model, config.num_experts, bias=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = torch.sigmoid(self.proj(tokens))
        weights, experts = scores.topk(self.top_k, -1)
        return weights, experts, scores.mean(0).square().sum()


def two() -> nn.Module:
    return Two(LosingLayer)


def two_of_one() -> nn.Module:
    return Two(LosingLayer, 1)


def summed() -> nn.Module:
    return Summed()


def running() -> nn.Module:
    return Running()


def rows() -> nn.Module:
    return Rows()


def hidden() -> nn.Module:
    return Hidden()


def growing() -> nn.Module:
    return Growing()


def apart() -> nn.Module:
    return Apart()


def scaled() -> nn.Module:
    return Scaled()


def parts() -> nn.Module:
    return Parts()


def turned() -> nn.Module:
    return Turned()


def later() -> nn.Module:
    return Later()


def both() -> nn.Module:
    return Both()


def two_become_one() -> nn.Module:
    return TwoBecomeOne()


def looking_late() -> nn.Module:
    return Looking(late=True)


def looking() -> nn.Module:
    return Looking(late=False)


def asked_twice() -> nn.Module:
    return AskedTwice()


def summing() -> nn.Module:
    return Summing()


def _mixed(kinds: str) -> nn.Module:
    config = models.get("moe", "tiny").config
    assert isinstance(config, ModelConfig)
    return Mixed(replace(config, balance_loss=0.02, z_loss=0.001), kinds)


def first_dense() -> nn.Module:
    return _mixed("dmmm")


def mixed() -> nn.Module:
    return _mixed("dmmdmm")


def by_turns() -> nn.Module:
    return _mixed("dmdm")


def by_turns_longer() -> nn.Module:
    return _mixed("dmmdmmdmm")


def shared() -> nn.Module:
    return models.get("moe", "tiny", num_layers=3, shared_d_ff=48, balance_loss=0.02)


def balanced() -> nn.Module:
    return models.get("moe", "tiny-losses", num_layers=6)


def routed() -> nn.Module:
    return use_router(models.get("moe", "tiny", num_layers=3), Router)
