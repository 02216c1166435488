"""Dropout and noise by counter: statistics, and that numbers follow from where an element is alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from mgraph import philox
from mgraph.ir.opdef import op_def
from mgraph.runtime import v1 as rt

SITE = "layers.*.drop"
PLACE = {"site": SITE, "call": 3}


def numbers(seed: int = 7, step: int = 2, sample: int = 0) -> list[Tensor]:
    return [torch.tensor(n) for n in (seed, step, sample)]


def mask(shape: tuple[int, ...], p: float = 0.25, samples: int = 1, **where: int) -> Tensor:
    """What dropout makes of ones."""
    place: dict[str, Any] = {**PLACE, "call": where.pop("call", 3)}
    body = op_def("dropout").body
    made: Tensor = body(torch.ones(shape), *numbers(**where), p=p, samples=samples, **place)
    return made


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_statistics(p: float) -> None:
    made = mask((50, 40, 50), p, 50)
    assert set(made.unique().tolist()) == {0.0, torch.tensor(1 / (1 - p)).item()}
    dropped = (made == 0).double()
    deviation = (p * (1 - p) / made.numel()) ** 0.5
    assert abs(float(dropped.mean()) - p) < 5 * deviation
    for dim in range(3):  # neighbours are independent
        length = dropped.shape[dim] - 1
        product = (dropped.narrow(dim, 0, length) - p) * (dropped.narrow(dim, 1, length) - p)
        assert abs(float(product.mean())) < 5 * p * (1 - p) / product.numel() ** 0.5


def test_all_and_nothing() -> None:
    assert not mask((3, 5), 1.0).any()
    assert torch.equal(mask((3, 5), 0.0), torch.ones(3, 5))
    assert mask((0, 5), 0.5).shape == (0, 5)


@pytest.mark.parametrize("inner", [(1,), (7,), (3, 5), (2, 4, 33)])
def test_a_sequence_gets_the_same_numbers_in_any_batch(inner: tuple[int, ...]) -> None:
    whole = mask((6, *inner), 0.5, 6)
    assert torch.equal(torch.cat([mask((2, *inner), 0.5, 2, sample=first) for first in (0, 2, 4)]), whole)
    flat = mask((6 * inner[0], *inner[1:]), 0.5, 6)
    assert torch.equal(flat.view_as(whole), whole)


@pytest.mark.parametrize("change", [{"seed": 8}, {"seed": 7 + 2**33}, {"step": 3}, {"sample": 4}, {"call": 4}])
def test_every_part_of_the_key_counts(change: dict[str, int]) -> None:
    assert not torch.equal(mask((4, 64), 0.5, 4), mask((4, 64), 0.5, 4, **change))


def test_large_tensors_are_made_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = mask((3, 1001), 0.5, 3)
    monkeypatch.setattr("mgraph.philox._CHUNK", {"cpu": 64})
    assert torch.equal(mask((3, 1001), 0.5, 3), whole)


def test_the_gradient_has_the_same_mask(check_op: Any) -> None:
    x, seed = torch.randn(4, 3, 5, requires_grad=True), numbers()
    kept = mask((4, 3, 5), 0.25, 4).double() / torch.tensor(1 / 0.75, dtype=torch.float32).double() / 0.75
    check_op("dropout", (x, *seed), {"p": 0.25, "samples": 4, **PLACE}, lambda x, *_: x * kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_runtime_draws_the_same(dtype: torch.dtype) -> None:
    x = torch.randn(3, 5, 9).to(dtype)
    expected = op_def("dropout").body(x, *numbers(), p=0.3, samples=3, **PLACE)
    assert torch.equal(rt.dropout(x, *numbers(), p=0.3, samples=3, **PLACE), expected)  # type: ignore[arg-type]
    noise = rt.random(*numbers(), shape=[3, 50], samples=3, **PLACE)  # type: ignore[arg-type]
    assert noise.min() >= 0 and noise.max() < 1 and abs(float(noise.mean()) - 0.5) < 0.15
    kept = mask((3, 50), 0.3, 3) != 0
    assert torch.equal(noise >= 0.3, kept), "dropout keeps where the uniform number is at least p"


@pytest.mark.parametrize("shape", [(3, 6, 5), (2, 4, 8), (1, 10, 1), (2, 2, 3, 7)])
def test_parts_of_sequences_have_the_numbers_of_the_whole(shape: tuple[int, ...]) -> None:
    whole, drawn = mask(shape, 0.5, shape[0]), numbers()
    bodies: list[Any] = [op_def("dropout_part").body, rt.dropout_part]
    for body, dim in itertools.product(bodies, [d for d in range(1, len(shape)) if shape[d] % 2 == 0]):
        parts = [
            body(torch.ones_like(x), *drawn, i, p=0.5, samples=shape[0], dim=dim, parts=2, **PLACE)
            for i, x in enumerate(whole.chunk(2, dim))
        ]
        assert torch.equal(torch.cat(parts, dim), whole)


def test_a_large_stretch_is_made_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = mask((2, 6, 35), 0.5, 2)
    monkeypatch.setitem(philox._CHUNK, "cpu", 16)
    seed, step, sample = numbers()
    part = rt.dropout_part(
        torch.ones(2, 2, 35), seed, step, sample, 1, p=0.5, samples=2, site=SITE, call=3, dim=1, parts=3
    )
    assert torch.equal(part, whole[:, 2:4])
