"""Products that add a third matrix as they are written: where the library is not asked, and on a GPU what it gives."""

from __future__ import annotations

import pytest
import torch

from mgraph.runtime import v1 as rt
from mgraph.runtime.cublas_lt import Shape, sum_of


def test_only_a_gpu_is_asked() -> None:
    total, left, right = (torch.ones(8, 8, dtype=torch.bfloat16) for _ in range(3))
    assert sum_of(total, left, right) is None


def test_operands_begin_where_kernels_read() -> None:
    """At 16 bytes, each row or column."""
    whole = torch.empty(16, 32, dtype=torch.bfloat16)
    assert Shape.of(whole[:, 8:16], whole[:8].t()[:8]) is not None
    assert Shape.of(whole[:, 1:9], whole[:8, :8]) is None
    assert Shape.of(whole[:8, :8], whole[:8, 1:9]) is None
    assert Shape.of(torch.empty(16, 31, dtype=torch.bfloat16)[:, :8], whole[:8, :8]) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strided", [False, True])
def test_matmul_add(dtype: torch.dtype, strided: bool) -> None:
    """Against float64, on totals without gaps or with, which stay as they are, or get the same bits."""
    generator = torch.Generator().manual_seed(0)
    total, left, right = (
        torch.randn(*shape, generator=generator).to(dtype) for shape in ((2, 3, 7), (2, 3, 5), (7, 5))
    )
    total = total.transpose(0, 1).contiguous().transpose(0, 1) if strided else total
    kept, want = total.clone(), total.double() + left.double() @ right.double().t()
    bound = 2**-6 if dtype is torch.bfloat16 else 1e-5
    made = rt.matmul_add(total, left, right.t())
    assert made.is_contiguous() and torch.equal(total, kept)
    torch.testing.assert_close(made.double(), want, rtol=bound, atol=bound)
    assert rt.matmul_add_(total, left, right.t()) is total and torch.equal(total, made)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "depth"), [(512, 1024), (1000, 136), (1, 64)])
def test_the_sum_of_a_product(dtype: torch.dtype, rows: int, depth: int) -> None:
    """Rounded once, as almost all elements show, in memory of its own; what begins elsewhere is left to torch."""
    total, left, right = (torch.randn(*shape).cuda().to(dtype) for shape in ((rows, 256), (rows, depth), (256, depth)))
    kept, want = total.clone(), total.double() + left.double() @ right.double().t()
    made = sum_of(total, left, right.t())
    assert made is not None and made.data_ptr() != total.data_ptr() and torch.equal(total, kept)
    assert float((made != want.to(dtype)).float().mean()) < 0.05  # 0.25, were the product rounded first
    odd = left[:, 1:], right[:, 1:].t()
    want = total.double() + odd[0].double() @ odd[1].double()
    assert sum_of(total, *odd) is None
    assert float((rt.matmul_add(total, *odd).double() - want).norm()) < 4e-3 * float(want.norm())
