"""In fixed shapes a row has the same bits, whatever lies beside it and wherever it lies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mgraph.errors import PackageError
from mgraph.runtime import invariant, moe
from mgraph.runtime.invariant import ELEMENTS, fixed_shapes
from mgraph.runtime.paged import paged_attention

WEIGHT, BIAS = torch.randn(37, 50), torch.randn(37)
OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: F.linear(x, WEIGHT.to(x.dtype)),
    "linear-bias": lambda x: F.linear(x, WEIGHT.to(x.dtype), BIAS.to(x.dtype)),
    "linear-3d": lambda x: F.linear(x[None], WEIGHT.to(x.dtype))[0],
    "matmul": lambda x: torch.matmul(x[None], WEIGHT.t().to(x.dtype)[None])[0],
    "silu": F.silu,
    "silu-in-place": lambda x: F.silu(x.clone(), inplace=True),
    "gelu": F.gelu,
    "power": lambda x: x.abs().pow(0.3),
    "pair": lambda x: torch.atan2(x, x[:, :1]),
    "softmax": lambda x: x.softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1, keepdim=True),
    "mean": lambda x: x.square().mean(-1, keepdim=True),
    "sum": lambda x: x.view(-1, 5, 10).sum(1),
    "layer-norm": lambda x: F.layer_norm(x, (50,)),
    "rsqrt": lambda x: (x.abs() + 1).rsqrt_(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPS)
def test_a_row_has_the_same_bits_alone_and_anywhere(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    row = torch.randn(1, 50).to(dtype)
    with fixed_shapes():
        alone = OPS[name](row)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(alone, OPS[name](row), rtol=tolerance, atol=tolerance)
    for rows in (2, 7, 16, 17, 65, 513):
        place = int(torch.randint(rows, ()))
        batch = torch.randn(rows, 50).to(dtype)
        batch[place] = row[0]
        with fixed_shapes():
            found = OPS[name](batch)
        assert found.shape[0] == rows and torch.equal(found[place], alone[0]), rows
        torch.testing.assert_close(found, OPS[name](batch), rtol=tolerance, atol=tolerance)


def test_without_it_bits_depend_on_the_batch() -> None:
    """Else these tests would prove nothing: a product has other bits on its own."""
    torch.manual_seed(0)
    x, weight = torch.randn(64, 512), torch.randn(1000, 512)
    assert not torch.equal(F.linear(x, weight)[:1], F.linear(x[:1], weight))
    with fixed_shapes(wanted=False):
        assert not torch.equal(F.linear(x, weight)[:1], F.linear(x[:1], weight))
    with fixed_shapes():
        assert torch.equal(F.linear(x, weight)[:1], F.linear(x[:1], weight))


@pytest.mark.parametrize("width", [48, 50], ids=["fused", "one-by-one"])
def test_products_of_experts(width: int) -> None:
    torch.manual_seed(0)
    weight, rows = torch.randn(3, width, 32), torch.randn(40, width)
    ends = torch.tensor([20, 20, 39], dtype=torch.int32)
    with fixed_shapes():
        found = moe.grouped_mm(rows, weight, ends)
        for place, expert in ((3, 0), (30, 2)):
            one = torch.tensor([int(expert <= e) for e in range(3)], dtype=torch.int32)
            assert torch.equal(moe.grouped_mm(rows[place : place + 1], weight, one)[0], found[place])
    expected = torch.cat([rows[:20] @ weight[0], rows[20:39] @ weight[2]])
    torch.testing.assert_close(found[:39], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("window", "softcap", "sink"), [(None, None, False), (9, None, True), (20, 5.0, False)])
def test_attention_of_a_position_is_the_same_in_every_chunk(
    window: int | None, softcap: float | None, sink: bool
) -> None:
    torch.manual_seed(0)
    size, length, total = 8, 45, 10
    keys, values = torch.randn(total * size, 2, 16), torch.randn(total * size, 2, 16)
    table = torch.randperm(total)[: -(-length // size)][None].int()
    keys_there = (table[0][:, None] * size + torch.arange(size)).flatten()[:length]
    q = torch.randn(length, 4, 16)
    sinks = [torch.randn(4)] if sink else []
    sight = {"block_size": size, "scale": 0.25, "window": window, "softcap": softcap}

    def chunk(begin: int, end: int) -> Tensor:
        k, v = keys.clone(), values.clone()
        for cache in (k, v):  # what is not written yet
            cache[keys_there[end:]] = float("nan")
        starts, lengths = torch.tensor([0, end - begin]).int(), torch.tensor([end]).int()
        return paged_attention(q[begin:end], k, v, starts, lengths, table, *sinks, **sight)  # type: ignore[arg-type]

    expected = chunk(0, length)
    with fixed_shapes():
        whole = chunk(0, length)
        for step in (1, 7, 16, 31):
            pieces = [chunk(at, min(length, at + step)) for at in range(0, length, step)]
            assert torch.equal(torch.cat(pieces), whole), step
    torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-5)


def test_exact_functions_and_large_tensors() -> None:
    x = torch.randn(3, ELEMENTS + 5)
    with fixed_shapes():
        assert torch.equal(torch.arange(7).sin()[5:6], torch.arange(5, 6).sin())
        turned = torch.view_as_complex(x[:, :6].reshape(-1, 2).contiguous())
        assert torch.equal((turned * turned)[4:5], turned[4:5] * turned[4:5])
        found = [x + 1, torch.arange(4).sum(), x.sigmoid(), torch.add(x, x, alpha=3)]
    expected = [x + 1, torch.tensor(6), x.sigmoid(), x * 4]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_results_go_where_they_are_asked_for() -> None:
    x = torch.randn(20, 6)
    found = torch.empty(20), torch.empty(0), torch.empty(20, 6), torch.empty(6, dtype=torch.int64), x.clone()
    with fixed_shapes():
        torch.sum(x, 1, out=found[0])
        torch.mean(x, (0,), keepdim=True, out=found[1])
        torch.softmax(x, 1, out=found[2])
        torch.sum(torch.ones(4, 6, dtype=torch.int64), 0, out=found[3])
        found[4].cumsum_(0)
        over_two = x.view(20, 2, 3).mean((0, 2))
    whole = torch.full((6,), 4)
    expected = x.sum(1), x.mean(0, keepdim=True), x.softmax(1), whole, x.cumsum(0), x.view(20, 2, 3).mean((0, 2))
    for one, other in zip((*found, over_two), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_sums_over_all_rows_are_refused() -> None:
    x = torch.randn(3, 3)
    sums: list[Callable[[], Tensor]] = [lambda: x.sum([]), lambda: x.mean(()), lambda: x.logsumexp([])]
    sums.append(lambda: torch.sum(x, [], out=torch.empty(())))
    for sum_ in sums:
        with fixed_shapes(), pytest.raises(PackageError, match="may depend on the number of rows"):
            sum_()


def test_products_of_a_gpu_that_add_nothing_up() -> None:
    a, b = torch.randn(2, 5, 1), torch.randn(2, 1, 4)
    assert torch.equal(invariant._outer(torch.ops.aten.bmm.default, a, b), torch.bmm(a, b))
    with pytest.raises(PackageError, match=r"aten\.mm"):
        invariant._outer(torch.ops.aten.mm.default, a[0].t(), b[0].t())
    with pytest.raises(PackageError, match=r"aten\.addmm"):
        invariant._outer(torch.ops.aten.addmm.default, a[0], a[0], b[0])


def test_what_is_not_known_is_refused_with_its_name() -> None:
    x = torch.randn(3, 3)
    with fixed_shapes(), pytest.raises(PackageError, match=r"aten\.linalg_qr.*may depend on the number of rows"):
        torch.linalg.qr(x)
    with fixed_shapes(), pytest.raises(PackageError, match=r"aten\.sum"):
        x.sum()
    with fixed_shapes(), pytest.raises(PackageError, match=r"aten\.rand\."):
        torch.rand(3)
    torch.linalg.qr(x)
