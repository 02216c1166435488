"""Finding the lists of layers, and standing between a layer and its caller."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mgraph.capture.layers import between, outermost_lists


class Base(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


class Derived(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Inherited(Derived):
    pass


def test_outermost_lists() -> None:
    inner = nn.ModuleList(nn.ModuleDict({"experts": nn.ModuleList(Base() for _ in range(5))}) for _ in range(4))
    named = nn.ModuleDict({str(i): Base() for i in (1, 2, 3, 4)})
    model = nn.ModuleDict({"blocks": inner, "few": nn.ModuleList([Base()] * 3), "named": named})
    found = outermost_lists(model, 4)
    assert list(found) == ["blocks"]
    assert list(found["blocks"]) == [f"blocks.{i}" for i in range(4)]
    assert list(outermost_lists(model, 5)) == [f"blocks.{i}.experts" for i in range(4)]


def test_between_sees_each_layer_once_and_leaves_no_trace() -> None:
    layers: dict[str, nn.Module] = {"base": Base(), "derived": Derived(), "inherited": Inherited()}
    seen = []

    def run(path: str, forward: Any, module: nn.Module, args: Any, keywords: Any) -> Any:
        seen.append(path)
        return forward(module, *args, **keywords)

    before = Base.forward, Derived.forward
    one = torch.tensor(1.0)
    with pytest.raises(KeyError), between(layers, run):
        assert [layer(one).item() for layer in layers.values()] == [2, 4, 4]
        assert Derived()(x=one).item() == 4, "another instance is not redirected"
        raise KeyError
    assert seen == ["base", "derived", "inherited"]
    assert (Base.forward, Derived.forward) == before
    assert "forward" not in vars(Inherited)
