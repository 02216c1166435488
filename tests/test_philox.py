"""Philox against its published vectors, its floats against float64, shards against the whole."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mgraph import philox
from mgraph.philox import key_from, normal, uniform

# Known answers of the Random123 library for philox4x32-10: counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def _block(words: tuple[int, int, int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a, b, c, d = (torch.tensor([word]) for word in words)
    return a, b, c, d


def _scalar_philox(counter: list[int], key: tuple[int, int]) -> list[int]:
    """The algorithm on Python integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c3 ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter: Any, key: tuple[int, int], expected: tuple[int, ...]) -> None:
    assert tuple(int(word) for word in philox.philox4x32(_block(counter), key)) == expected
    assert tuple(_scalar_philox(list(counter), key)) == expected


def test_key_is_stable_and_tells_parts_apart() -> None:
    assert key_from(7, "layers.0.attn.q.weight", 0) == (0xC75343AF, 0x5C9077EC)
    keys = [key_from(0), key_from(1), key_from(0, "1"), key_from(0, 1), key_from(0, "1", 0), key_from(0, "10")]
    assert len(set(keys)) == len(keys)


def test_element_is_lane_of_its_block() -> None:
    """Also past 2**32 blocks, where the second counter word starts."""
    key = key_from(3, "x")
    first = 4 * (2**32 - 1) + 1
    values = uniform((9,), key, offset=(first,), global_shape=(first + 100,), dtype=torch.float64)
    for position, value in enumerate(values.tolist()):
        block, lane = divmod(first + position, 4)
        word = _scalar_philox([block & 0xFFFFFFFF, block >> 32, 0, 0], key)[lane]
        assert value == (word >> 8) / 2**24


def test_normal_is_box_muller_of_the_words() -> None:
    key = key_from(5, "y")
    values = normal((4001,), key).double()
    words = torch.tensor([_scalar_philox([block, 0, 0, 0], key) for block in range(1001)], dtype=torch.float64)
    radius = torch.sqrt(-2 * torch.log((torch.floor(words[:, 0::2] / 256) + 1) / 2**24)).flatten()
    points = values.new_zeros(4004)
    points[:4001] = values
    points = points.view(-1, 2)
    assert torch.allclose(points[:2000].pow(2).sum(1).sqrt(), radius[:2000], rtol=1e-6, atol=1e-7)
    turn = torch.remainder(words[:, 1::2], 2**24).flatten()
    quarter = (turn - 2**23 + 0.5) * (math.pi / 2 / 2**24)
    angle = torch.atan2(points[:2000].abs().amin(1), points[:2000].abs().amax(1))
    assert torch.allclose(angle, quarter[:2000].abs(), atol=1e-6)


@pytest.mark.parametrize("draw", [uniform, normal])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_shard_equals_slice(draw: Any, dtype: torch.dtype, data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 13), max_size=4))
    start = [data.draw(st.integers(0, size)) for size in shape]
    stop = [data.draw(st.integers(low, size)) for low, size in zip(start, shape, strict=True)]
    key = key_from(1, "w")
    whole = draw(shape, key, dtype=dtype)
    block = whole[tuple(slice(a, b) for a, b in zip(start, stop, strict=True))]
    shard = draw(block.shape, key, offset=start, global_shape=shape, dtype=dtype)
    assert torch.equal(shard, block)


@pytest.mark.parametrize("draw", [uniform, normal])
@pytest.mark.parametrize("dim", [0, 1])
def test_large_shards_and_chunks(draw: Any, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the shard, nor the chunk size, nor threads change a bit."""
    shape, key = (301, 1003), key_from(1, "w")
    whole = draw(shape, key)
    for index, piece in enumerate(whole.chunk(4, dim)):
        offset = [0, 0]
        offset[dim] = index * whole.chunk(4, dim)[0].shape[dim]
        assert torch.equal(draw(piece.shape, key, offset=offset, global_shape=shape), piece)
    monkeypatch.setitem(philox._CHUNK, "cpu", 999)
    assert torch.equal(draw(shape, key), whole)


def test_square_roots_of_all_radii_are_rounded_correctly() -> None:
    squares = philox._log(torch.arange(1, 2**24 + 1).to(torch.float32) * 2.0**-24) * -2.0
    assert torch.equal(philox._square_root(squares), torch.from_numpy(np.sqrt(squares.numpy())))


def test_logarithms_are_accurate() -> None:
    x = torch.arange(1, 2**24 + 1, 7).to(torch.float32) * 2.0**-24
    exact = x.double().log()
    assert ((philox._log(x).double() - exact).abs() <= 3e-7 * exact.abs() + 1e-9).all()


def test_moments() -> None:
    """Four standard errors of a million draws."""
    u, z = uniform((1_000_000,), key_from(9)).double(), normal((1_000_000,), key_from(9)).double()
    assert u.min() >= 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 4 * math.sqrt(1 / 12 / 1e6)
    assert abs(z.mean()) < 4e-3
    assert abs(z.pow(2).mean() - 1) < 4 * math.sqrt(2 / 1e6)
    assert abs(z.pow(3).mean()) < 4 * math.sqrt(15 / 1e6)
    assert abs(z.pow(4).mean() - 3) < 4 * math.sqrt(96 / 1e6)
    assert abs((z[0::2] * z[1::2]).mean()) < 4 * math.sqrt(1 / 5e5)
    tail = math.erfc(2 / math.sqrt(2))  # share of |z| > 2
    assert abs((z.abs() > 2).double().mean() - tail) < 4 * math.sqrt(tail / 1e6)


@pytest.mark.gpu
@pytest.mark.parametrize("draw", [uniform, normal])
def test_cuda_equals_cpu(draw: Any) -> None:
    key = key_from(2, "w")
    assert torch.equal(draw((3001, 67), key, device="cuda").cpu(), draw((3001, 67), key))
