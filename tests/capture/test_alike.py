"""What counts as alike: values made of the same, whatever objects they are; and which attributes are not."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mgraph.capture.alike import Alike, differing, named_tensors, partners, same_structure

NAN = float("nan")


def scaled(factor: float) -> Any:
    """A function that holds a number."""
    return lambda x: x * factor


def cycle(value: int) -> list[Any]:
    """A list that holds itself."""
    made: list[Any] = [value]
    made.append(made)
    return made


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        (1, 1, True),
        (1, 1.0, False),
        (1, True, False),
        (0.0, -0.0, False),
        (NAN, NAN, True),
        ("a", "b", False),
        ([1, (2, {"a": 3})], [1, (2, {"a": 3})], True),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, False),
        ({1, 2}, {2, 1}, True),
        (OrderedDict(a=1), {"a": 1}, False),
        (partial(scaled, 2.0), partial(scaled, 2.0), True),
        (partial(scaled, 2.0), partial(scaled, 3.0), False),
        (scaled(2.0), scaled(2.0), True),
        (scaled(2.0), scaled(3.0), False),
        (SimpleNamespace(a=[1]), SimpleNamespace(a=[1]), True),
        (SimpleNamespace(a=[1]), SimpleNamespace(a=[2]), False),
        (cycle(1), cycle(1), True),
        (cycle(1), cycle(2), False),
        (torch.float32, torch.float32, True),
        (torch.device("cpu"), torch.device("meta"), False),
        (torch.ones(1), torch.ones(1), False),
    ],
)
def test_alike(one: Any, two: Any, same: bool) -> None:
    assert Alike({})(one, two) is same
    assert Alike({})(one, one)


def test_partners_stand_for_each_other() -> None:
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    alike = Alike(partners(one, two))
    assert alike([one, one.weight], [two, two.weight])
    assert not alike([one.weight], [two.bias])


def test_what_was_assumed_of_a_cycle_is_not_kept() -> None:
    def pair(value: int) -> tuple[list[Any], list[Any]]:
        inner: list[Any] = []
        outer = [inner, value]
        inner.append(outer)
        return outer, inner

    (outer, inner), (other, other_inner) = pair(1), pair(2)
    alike = Alike({})
    assert not alike(outer, other)
    assert not alike(outer, other)
    assert not alike(inner, other_inner)


def test_differing_attributes() -> None:
    def layer(eps: float) -> nn.Module:
        return nn.ModuleDict({"norm": nn.LayerNorm(4, eps=eps), "first": nn.Linear(4, 4)})

    one, same, other = layer(1e-5), layer(1e-5), layer(1e-6)
    other["first"].extra = 1  # type: ignore[index]
    assert same_structure(one, other)
    assert list(differing(one, same, Alike(partners(one, same)))) == []
    assert list(differing(one, other, Alike(partners(one, other)))) == [("norm", "eps"), ("first", "extra")]


def test_structure_is_classes_names_and_types() -> None:
    frozen = nn.Linear(4, 4).requires_grad_(False)
    for other in (nn.Linear(4, 5), nn.Linear(4, 4, bias=False), nn.Linear(4, 4).double(), frozen, nn.Identity()):
        assert not same_structure(nn.Linear(4, 4), other)
    assert same_structure(nn.Linear(4, 4), nn.Linear(4, 4))
    assert list(named_tensors(nn.Sequential(nn.Linear(1, 1)))) == ["0.weight", "0.bias"]
