"""Models of alike layers, most with something in them that a trace of one layer does not show."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 8
_COUNT = [0]


class Block(nn.Module):
    """One layer; each model has its own `act`."""

    def __init__(self, index: int, act: Callable[[Block, Tensor], Tensor]) -> None:
        super().__init__()
        self.index = index
        self.act = act
        self.first = nn.Linear(WIDTH, 16)
        self.second = nn.Linear(16, WIDTH, bias=False)
        self.drop = nn.Dropout(0.1)
        self.count = 0
        self.longer = False
        self.shared: dict[str, Any] = {}
        self.register_buffer("scale", torch.tensor([1.0 + index]))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, WIDTH] -> the same."""
        made: Tensor = self.second(self.act(self, self.first(x)))
        return x + made


class Model(nn.Module):
    """Layers between an embedding and a head."""

    def __init__(self, act: Callable[[Block, Tensor], Tensor], kind: type[Block] = Block) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(kind(i, act) for i in range(4))
        self.head = nn.Linear(WIDTH, 32)

    def blocks(self) -> list[Block]:
        """The layers."""
        return [layer for layer in self.layers if isinstance(layer, Block)]

    def run(self, x: Tensor) -> Tensor:
        """All layers."""
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens i64[B, S] -> logits."""
        logits: Tensor = self.head(self.run(self.embed(tokens)))
        return logits


def _relu(block: Block, h: Tensor) -> Tensor:
    return F.relu(h)


def plain() -> nn.Module:
    """Nothing special: a buffer each, and objects that are alike but not the same."""

    def act(slope: float, block: Block, h: Tensor) -> Tensor:
        return F.leaky_relu(h, slope) * block.get_buffer("scale")

    model = Model(partial(act, 0.25))
    for layer in model.blocks():
        layer.act = partial(act, 0.25)
    return model


def dropout() -> nn.Module:
    """Random numbers in every layer."""
    return Model(lambda block, h: block.drop(F.relu(h)))


def noise() -> nn.Module:
    """Numbers that are written into a new tensor."""
    return Model(lambda block, h: h * torch.empty_like(h).uniform_(0.9, 1.1))


class Detaching(Block):
    """The mean of what comes in has no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        """As of `Block`, about a fixed mean."""
        return super().forward(x - x.mean(-1, keepdim=True).detach())


def detached() -> nn.Module:
    """No gradient flows into the first layer, so there a detach means nothing."""
    model = Model(_relu, Detaching)
    model.embed.requires_grad_(False)
    return model


def frozen_layer() -> nn.Module:
    """One layer is not trained."""
    model = Model(_relu)
    model.layers[2].requires_grad_(False)
    return model


def tied() -> nn.Module:
    """All layers share one weight, and two share another."""
    model = Model(_relu)
    blocks = model.blocks()
    for block in blocks:
        block.first.weight = blocks[0].first.weight
    blocks[3].second.weight = blocks[1].second.weight
    return model


class Returning(Block):
    """Takes and returns more than a tensor."""

    def forward(self, x: Tensor, pair: tuple[Tensor, int], *, length: int) -> Any:  # type: ignore[override]
        """The first result is new, the others are as they came."""
        return {"x": super().forward(x) * pair[0] + length, "pair": pair, "none": None, "name": "layer"}


class ReturningModel(Model):
    """Hands layers what the last returned."""

    def run(self, x: Tensor) -> Tensor:
        """All layers."""
        pair = x.mean(-1, keepdim=True), 3
        for layer in self.layers:
            found = layer(x, pair, length=x.shape[1])
            x, pair = found["x"], found["pair"]
        return x * pair[0]


def returning() -> nn.Module:
    """Arguments and results of many kinds."""
    return ReturningModel(_relu, Returning)


def by_index() -> nn.Module:
    """A layer's number is a factor."""
    return Model(lambda block, h: F.relu(h) * (block.index + 1))


def by_pairs() -> nn.Module:
    """Every other layer has another activation."""
    model = Model(_relu)
    for layer in model.blocks()[1::2]:
        layer.act = lambda block, h: F.gelu(h)
    return model


def by_length() -> nn.Module:
    """A layer does something else for lengths that the trace has not: only its conditions show it."""

    def act(block: Block, h: Tensor) -> Tensor:
        if block.longer and h.shape[1] > 100:
            h = h * 2
        return F.relu(h)

    model = Model(act)
    model.blocks()[2].longer = True
    return model


def counting() -> nn.Module:
    """A layer counts how often it ran."""

    def act(block: Block, h: Tensor) -> Tensor:
        block.count += 1
        return F.relu(h) * block.count

    return Model(act)


def counting_all() -> nn.Module:
    """All layers count together, beside the model."""

    def act(block: Block, h: Tensor) -> Tensor:
        _COUNT[0] += 1
        return F.relu(h) * _COUNT[0]

    return Model(act)


def constant() -> nn.Module:
    """A layer makes a tensor of numbers."""
    return Model(lambda block, h: h * torch.tensor([0.5, 2.0]).repeat(8))


class SharingModel(Model):
    """All layers have one dict, which is as it was after each run."""

    def __init__(self, act: Callable[[Block, Tensor], Tensor]) -> None:
        super().__init__(act)
        self.shared: dict[str, Any] = {"seen": []}
        for layer in self.blocks():
            layer.shared = self.shared


class ListModel(SharingModel):
    """Reads what layers put into a list."""

    def run(self, x: Tensor) -> Tensor:
        """All layers, and the means of their activations."""
        total = super().run(x)
        while self.shared["seen"]:
            total = total + self.shared["seen"].pop()
        return total


def escaping() -> nn.Module:
    """What a layer makes is read outside without being returned."""

    def act(block: Block, h: Tensor) -> Tensor:
        block.shared["seen"].append(h.mean(-1, keepdim=True))
        return F.relu(h)

    return ListModel(act)


class Hooked(Block):
    """A hook hands out what a part of a layer makes."""

    def __init__(self, index: int, act: Callable[[Block, Tensor], Tensor]) -> None:
        super().__init__(index, act)
        self.first.register_forward_hook(self.hand_out)

    def hand_out(self, part: nn.Module, given: Any, made: Tensor) -> None:
        """A hook."""
        self.shared["seen"].append(made.mean(-1, keepdim=True))


def hooked() -> nn.Module:
    """What a part of a layer makes is read outside through a hook."""
    model = ListModel(_relu)
    model.layers = nn.ModuleList(Hooked(i, _relu) for i in range(4))
    for layer in model.blocks():
        layer.shared = model.shared
    return model


class ReachingModel(SharingModel):
    """Layers reach for a tensor of the model's."""

    def run(self, x: Tensor) -> Tensor:
        """All layers."""
        self.shared["gate"] = x.mean(-1, keepdim=True)
        x = super().run(x)
        del self.shared["gate"]
        return x


def reaching() -> nn.Module:
    """A layer reads a tensor that it is not handed."""
    return ReachingModel(lambda block, h: F.relu(h) * block.shared["gate"])


class Writing(Block):
    """Changes what it is handed."""

    def forward(self, x: Tensor) -> Tensor:
        """As of `Block`, in place."""
        x += self.second(self.act(self, self.first(x)))
        return x


def writing() -> nn.Module:
    """A layer changes its input in place."""
    return Model(_relu, Writing)


class WithoutGradient(Block):
    """Has a region without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        """As of `Block`, about a fixed mean."""
        with torch.no_grad():
            mean = x.mean(-1, keepdim=True) + 1
        return super().forward(x - mean)


def without_gradient() -> nn.Module:
    """A region without gradients in every layer."""
    return Model(_relu, WithoutGradient)


class RegionModel(Model):
    """Runs its layers in a region without gradients."""

    def run(self, x: Tensor) -> Tensor:
        """All layers."""
        with torch.no_grad():
            return super().run(x)


def in_region() -> nn.Module:
    """Layers in a region without gradients."""
    return RegionModel(_relu)


class TwiceModel(Model):
    """Runs all its layers twice."""

    def run(self, x: Tensor) -> Tensor:
        """All layers, and again."""
        return super().run(super().run(x))


def twice() -> nn.Module:
    """Each layer runs twice."""
    return TwiceModel(_relu)


class SequentialModel(Model):
    """Has its layers in a Sequential."""

    def __init__(self, act: Callable[[Block, Tensor], Tensor]) -> None:
        super().__init__(act)
        self.layers = nn.Sequential(*self.layers)  # type: ignore[assignment]

    def run(self, x: Tensor) -> Tensor:
        """All layers."""
        found: Tensor = self.layers(x)
        return found


def sequential() -> nn.Module:
    """Layers in a Sequential."""
    return SequentialModel(_relu)


def by_value() -> nn.Module:
    """A value of a tensor made of numbers is read while tracing."""
    return Model(lambda block, h: F.relu(h) * float(torch.tensor(2.5)))
