"""The meaning of the paged cache and of attention over it, against loops over positions."""

from __future__ import annotations

import pytest
import torch

from mgraph.ir.opdef import op_def
from mgraph.ir.types import DType, TensorType
from tests.ir.ops.paged_cases import MIXED, VARIANTS, expected, ragged, variant


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_attention_reads_the_rows_of_its_request_alone(name: str, block_size: int) -> None:
    given = ragged(MIXED, block_size=block_size)
    attrs, sinks = variant(name, 4)
    more = () if sinks is None else (sinks,)
    body = op_def("paged_attention").body
    made = body(*given.operands, *more, block_size=block_size, scale=0.3, **attrs)
    torch.testing.assert_close(made, expected(given, 0.3, sinks=sinks, **attrs), rtol=1e-12, atol=1e-12)
    assert made[-2:].eq(0).all(), "padding tokens give 0"


def test_append_writes_the_slots_and_nothing_else() -> None:
    keys, values = torch.zeros(8, 2, 3), torch.zeros(8, 2, 5)
    k, v = torch.randn(3, 2, 3), torch.randn(3, 2, 5)
    made = op_def("kv_append").body(keys, values, k, v, torch.tensor([6, 1, 0]))
    for cache, new in zip(made, (k, v), strict=True):
        assert torch.equal(cache[[6, 1, 0]], new)
        assert cache[[2, 3, 4, 5, 7]].eq(0).all()
    assert keys.eq(0).all()


@pytest.mark.parametrize("normed", [False, True])
def test_norm_rope_and_append_in_one_are_the_three(normed: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(5, heads, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    cos, sin = torch.randn(2, 5, 8, generator=generator, dtype=torch.float64)
    weights = list(torch.rand(2, 8, generator=generator, dtype=torch.float64)) if normed else []
    caches = torch.zeros(2, 12, 2, 8, dtype=torch.float64)
    slots = torch.tensor([4, 9, 1, 0, 11])
    found = op_def("rope_kv_append").body(*caches, q, k, v, slots, cos, sin, *weights, eps=1e-6, style="half")

    def turned(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        x = x if weight is None else x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight
        first, second = x.chunk(2, -1)
        made: torch.Tensor = x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]
        return made

    pairs = weights or [None, None]
    torch.testing.assert_close(found[2], turned(q, pairs[0]), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[0][slots], turned(k, pairs[1]), rtol=1e-12, atol=1e-12)
    assert torch.equal(found[1][slots], v)


def test_what_does_not_fit_is_refused() -> None:
    infer = op_def("paged_attention").result_types
    heads, cache = TensorType(DType.F32, (7, 4, 8)), TensorType(DType.F32, (32, 2, 8))
    tables = [TensorType(DType.I32, shape) for shape in ((4,), (3,), (3, 2))]
    attrs = {"block_size": 4, "scale": 1.0}
    assert infer((heads, cache, cache, *tables), attrs) == (heads,)
    with pytest.raises(ValueError, match="heads of q"):
        infer((TensorType(DType.F32, (7, 3, 8)), cache, cache, *tables), attrs)
    with pytest.raises(ValueError, match="sinks"):
        infer((heads, cache, cache, *tables, TensorType(DType.F32, (3,))), attrs)
    with pytest.raises(ValueError, match="do not fit the caches"):
        op_def("kv_append").result_types((cache, cache, heads, heads, TensorType(DType.I64, (7,))), {})
