"""Products of groups by Transformer Engine: the library replaced by a stub that multiplies as it documents."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from mgraph.runtime import te_products
from mgraph.runtime import v1 as rt


class Stub:
    """`general_grouped_gemm`: of layout TN each matrix is [N, K] in memory, of NN it is [K, N]; all are contiguous."""

    def __init__(self) -> None:
        self.layouts: list[str] = []

    def general_grouped_gemm(self, a: Any, b: Any, out: Any, quantizers: Any, dtype: Any, **more: Any) -> Any:
        assert len(a) == len(b) == len(out) == len(quantizers) and quantizers == [None] * len(a)
        assert more["m_splits"] == [len(rows) for rows in b] and all(more["m_splits"])
        self.layouts.append(more["layout"])
        for matrix, rows, into in zip(a, b, out, strict=True):
            assert matrix.is_contiguous() and rows.is_contiguous() and into.dtype == dtype
            into.copy_(rows.double() @ (matrix.t() if more["layout"] == "TN" else matrix).double())
        return out, None, None


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sizes", [(3, 0, 5, 1), (0, 0, 0, 9), (0, 0, 0, 0)], ids=str)
def test_products_of_groups(sizes: tuple[int, ...], transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Stub()
    monkeypatch.setattr(te_products, "_library", lambda: stub)
    monkeypatch.setattr(te_products, "_is_there", lambda device: True)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(sizes) + 2, 6, generator=generator).bfloat16()
    weight = torch.randn(4, *((7, 6) if transposed else (6, 7)), generator=generator).bfloat16()
    weight = weight.transpose(1, 2) if transposed else weight
    bias = torch.randn(4, 7, generator=generator).bfloat16()
    offsets = torch.tensor(sizes).cumsum(0).int()
    found = rt.grouped_mm(rows, weight, offsets, by="te")
    owner = [e for e, size in enumerate(sizes) for _ in range(size)]
    for row, e in enumerate(owner):
        assert torch.allclose(found[row].double(), rows[row].double() @ weight[e].double(), rtol=2**-8, atol=1e-6)
    assert not found[len(owner) :].any()
    with_bias = rt.grouped_mm(rows, weight, offsets, bias, by="te")[: len(owner)]
    assert torch.equal(with_bias, found[: len(owner)] + bias[owner])
    assert stub.layouts == ["TN" if transposed else "NN"] * (2 if owner else 0)


def test_where_it_does_not_run_torch_does_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(te_products, "_said", set())
    rows, weight, offsets = torch.randn(4, 8), torch.randn(2, 8, 8), torch.tensor([1, 4], dtype=torch.int32)
    with pytest.warns(RuntimeWarning, match=r"they are torch\.float32 and torch\.float32; torch does"):
        found = rt.grouped_mm(rows, weight, offsets, by="te")
    assert torch.equal(found, rt.grouped_mm(rows, weight, offsets))
    with pytest.warns(RuntimeWarning, match="it is not installed, or not for cpu"):
        assert not te_products.fits(rows.bfloat16(), weight.bfloat16())
    assert not te_products._is_there(torch.device("cuda", 0)), "it is not installed here"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert te_products._is_there(torch.device("cuda", 0))
    with pytest.warns(RuntimeWarning, match="lie otherwise"):
        assert not te_products.fits(rows.t().bfloat16(), torch.randn(4, 8).bfloat16())
