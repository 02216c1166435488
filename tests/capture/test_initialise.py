"""Recorded initialisation, replayed, has the values (constants) or the distribution (random) of an eager build."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mgraph.capture.initialise import Built, build
from mgraph.capture.source import ModelSpec, resolve
from mgraph.errors import ModelError
from mgraph.ir.graph import InitCall


def replay(calls: tuple[InitCall, ...], like: Tensor) -> Tensor:
    """Run a program with torch's own random numbers."""
    made = torch.empty_like(like)
    for name, *arguments in calls:
        if name == "copy_":
            made.copy_(torch.tensor(arguments[0], dtype=made.dtype).view(made.shape))
        elif name == "fill_range_":
            start, stop, value = (float(str(a)) for a in arguments)
            made.view(-1)[int(start) : int(stop)] = value
        elif name == "zeros_":
            made.zero_()
        else:
            getattr(made, str(name))(*arguments)
    return made


def check_like_eager(factory: Callable[[], Any]) -> Built:
    """Every tensor: equal where eager is constant or computed, the same mean, deviation and bounds where random."""
    built, eager = build(factory, "test"), factory()
    tensors = {n: t.detach() for n, t in [*eager.named_parameters(), *eager.named_buffers()]}
    assert set(built.inits) == set(tensors)
    for name, calls in built.inits.items():
        expected = tensors[name]
        made = replay(calls, expected)
        if not any(c[0] in ("normal_", "uniform_") for c in calls):
            assert torch.equal(made, expected), name
            continue
        wide, reference = made.double(), expected.double()
        spread, count = reference.std(), reference.numel()
        assert abs(wide.mean() - reference.mean()) < 8 * spread / math.sqrt(count), name
        assert abs(wide.std() / spread - 1) < 6 / math.sqrt(count), name
        assert wide.abs().max() < 2 * reference.abs().max(), name
    return built


@pytest.mark.parametrize("name", ["dense-tiny", "dense-tiny-geglu", "moe-tiny"])
def test_zoo(name: str) -> None:
    built = check_like_eager(resolve(ModelSpec(name)).factory)
    assert all(p.is_meta or type(p.data).__name__ == "FakeTensor" for p in built.module.parameters())


def test_transformers_llama(llama: str) -> None:
    built = check_like_eager(resolve(ModelSpec(llama)).factory)
    assert built.inits["model.layers.0.mlp.up_proj.weight"] == (("normal_", 0.0, 0.02),)
    assert built.inits["model.layers.0.input_layernorm.weight"] == (("fill_", 1.0),)


class Every(nn.Module):
    """Parameters made in all the ways that leave a program."""

    def __init__(self, size: int) -> None:
        super().__init__()
        shape = (size, 64)
        self.kaiming, self.xavier, self.truncated, self.scaled, self.copied = (
            nn.Parameter(torch.empty(shape)) for _ in range(5)
        )
        nn.init.kaiming_uniform_(self.kaiming, a=math.sqrt(5))
        nn.init.xavier_normal_(self.xavier)
        nn.init.trunc_normal_(self.truncated, std=0.5, a=-0.75, b=1.0)
        with torch.no_grad():
            self.scaled.uniform_(-1, 3).mul_(0.5).add_(1).clamp_(0.75, 2.25)
            self.copied.copy_(torch.randn(shape) / 8)
        self.drawn = nn.Parameter(torch.rand(shape) * 2 - 1)
        self.twice = nn.Parameter(torch.randn(shape))
        nn.init.constant_(self.twice, 3.0)
        self.zero = nn.Parameter(torch.zeros(shape).bfloat16())
        self.linear = nn.Linear(64, size)
        self.padded = nn.Embedding(size, 64, padding_idx=3)
        self.register_buffer("ramp", torch.arange(8).float().exp())
        self.register_buffer("mask", torch.ones(5, 5, dtype=torch.bool).tril())


@pytest.mark.parametrize("size", [64, 2048], ids=["real", "meta"])
def test_every_way(size: int) -> None:
    built = check_like_eager(lambda: Every(size))
    assert built.inits["twice"] == (("fill_", 3.0),), "a later overwrite starts anew"
    assert built.inits["zero"] in ((("zeros_",),), (("fill_", 0.0),))
    low, high = built.inits["truncated"][-1][1:]
    assert (low, high) == (-0.75, 1.0)
    assert built.inits["padded.weight"][1:] == (("fill_range_", 192, 256, 0.0),), "the row of the padding token"


def test_the_random_state_of_the_caller_is_kept() -> None:
    before = torch.get_rng_state()
    build(lambda: Every(64), "test")
    assert torch.equal(torch.get_rng_state(), before)


def test_ties_hold() -> None:
    built = build(resolve(ModelSpec("dense-tiny-geglu")).factory, "test")
    assert built.aliases["head.weight"] == built.aliases["embed.weight"] == "embed.weight"
    assert "head.weight" not in built.inits
    assert built.module.head.weight is built.module.embed.weight  # type: ignore[union-attr]


def _column() -> nn.Module:
    layer = nn.Linear(10, 4)
    with torch.no_grad():
        layer.weight[:, 3].zero_()
    return nn.Sequential(layer)


def _orthogonal() -> nn.Module:
    layer = nn.Linear(512, 512, bias=False)
    nn.init.orthogonal_(layer.weight)
    return nn.Sequential(layer)


def _empty() -> nn.Module:
    model = nn.Module()
    model.weight = nn.Parameter(torch.empty(4))
    return model


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (_column, "initialisation of '0.weight' cannot be recorded: aten.(fill_|zero_)"),
        (_orthogonal, "initialisation of '0.weight' cannot be recorded"),
        (_empty, "'weight' is never initialised"),
        (lambda: 3, "the factory returned int, not an nn.Module"),
        (lambda: nn.Linear(2, 2, device="nowhere"), "building the model failed: RuntimeError"),
    ],
)
def test_what_cannot_be_recorded_is_refused(factory: Callable[[], Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build(factory, "test")
