"""The paged cache on torch, against loops over positions and the meaning of the ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mgraph.ir.opdef import op_def
from mgraph.runtime import v1 as rt
from tests.ir.ops.paged_cases import MIXED, VARIANTS, expected, ragged, variant


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(("heads", "groups", "block_size"), [(4, 2, 4), (3, 3, 1), (4, 1, 16)])
def test_attention(name: str, heads: int, groups: int, block_size: int) -> None:
    given = ragged(MIXED, heads=heads, groups=groups, block_size=block_size, dtype=torch.float32)
    attrs, sinks = variant(name, heads)
    more = () if sinks is None else (sinks.float(),)
    made = rt.paged_attention(*given.operands, *more, block_size=block_size, scale=0.3, **attrs)
    wanted = expected(given, 0.3, sinks=sinks, **attrs)
    torch.testing.assert_close(made.double(), wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_append(normed: bool, style: str) -> None:
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(6, heads, 8, generator=generator) for heads in (4, 2, 2))
    cos, sin = torch.randn(2, 6, 4, generator=generator)
    weights = tuple(torch.rand(2, 8, generator=generator)) if normed else ()
    caches = torch.randn(2, 16, 2, 8, generator=generator)
    slots = torch.tensor([4, 9, 1, 15, 11, 2])
    options: dict[str, Any] = {"eps": 1e-5} if normed else {}
    wanted = op_def("rope_kv_append").body(*caches, q, k, v, slots, cos, sin, *weights, style=style, **options)
    turned = rt.rope_kv_append_(caches[0], caches[1], q, k, v, slots, cos, sin, *weights, style=style, **options)
    for found, exact in zip((*caches, turned), wanted, strict=True):
        torch.testing.assert_close(found, exact)
    rt.kv_append_(caches[0], caches[1], k, v, slots)
    assert torch.equal(caches[0][slots], k) and torch.equal(caches[1][slots], v)
