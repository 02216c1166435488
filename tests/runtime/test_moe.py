"""The runtime's mixture of experts against the bodies that define its ops, at awkward sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mgraph.errors import PackageError
from mgraph.ir.opdef import op_def
from mgraph.ir.types import DType
from mgraph.runtime import moe
from mgraph.runtime import v1 as rt
from tests.runtime.test_ops import check, numbers

ROUTERS: list[dict[str, Any]] = [
    {},
    {"renormalize": True},
    {"score": "softmax_chosen"},
    {"score": "sigmoid"},
    {"score": "sigmoid", "renormalize": True, "epsilon": 1e-20, "scale": 2.5},
    {"renormalize": True, "epsilon": 0.1},
]


@pytest.mark.parametrize("how", ROUTERS, ids=str)
@pytest.mark.parametrize("groups", [{}, {"groups": 3, "top_groups": 2, "group_best": 2}], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_moe_route(how: dict[str, Any], groups: dict[str, Any], biased: bool) -> None:
    logits = numbers(13, 6)
    bias = numbers(6) if biased else None
    operands = (logits,) if bias is None else (logits, bias)
    check(
        "moe_route", *operands, top_k=2, exact_dtype=({"dtype": DType.BF16}, {"dtype": torch.bfloat16}), **how, **groups
    )
    _, indices = rt.moe_route(logits, bias, top_k=2, **how, **groups)
    check("moe_route_grad", numbers(13, 2), logits, indices, **how)


def test_grouped_products_with_bias() -> None:
    """Widths that the fused product takes and that it does not; empty groups at all places."""
    for width, ends in ((8, [0, 3, 3, 7]), (5, [2, 2, 7, 7]), (8, [0, 0, 0, 7])):
        rows, weight, bias = numbers(7, width), numbers(4, width, width), numbers(4, width)
        offsets = torch.tensor(ends, dtype=torch.int32)
        expected = op_def("grouped_matmul").body(rows, weight, offsets, bias)
        torch.testing.assert_close(rt.grouped_mm(rows, weight, offsets, bias), expected)
        check("grouped_sum", rows, offsets)


@pytest.mark.parametrize("dtype", [(DType.F32, torch.float32), (DType.BF16, torch.bfloat16)])
def test_moe_rows(dtype: tuple[DType, torch.dtype]) -> None:
    """An expert without tokens among them."""
    x, indices = numbers(9, 5, dtype=dtype[1]), torch.randint(3, (9, 2)) * 2
    check("moe_dispatch", x, indices, num_experts=6)
    rows, order, _ = rt.moe_dispatch(x, indices, num_experts=6)
    weights = numbers(9, 2, dtype=dtype[1])
    check("moe_dispatch_grad", rows, order, top_k=2)
    check("moe_dispatch_grad", rows, order, numbers(18, 5, dtype=dtype[1]), top_k=2)
    check("moe_combine", rows, weights, order, exact_dtype=({"dtype": dtype[0]}, {"dtype": dtype[1]}))
    wide = ({"dtype": DType.F32}, {"dtype": torch.float32})
    check("moe_combine", rows, weights.float(), order, exact_dtype=wide)
    check("moe_combine_grad", x, rows, weights, order)


def test_rows_of_no_expert_are_not_read() -> None:
    x, indices = numbers(9, 5), torch.randint(4, (9, 2))
    check("moe_dispatch", x, indices, num_experts=3, others=True)
    rows, order, offsets = rt.moe_dispatch(x, indices, num_experts=3, others=True)
    weights, more, end = numbers(9, 2), numbers(18, 5), int(offsets[-1])
    assert end < 18
    wide = ({"dtype": DType.F32}, {"dtype": torch.float32})
    rows[end:] = torch.nan
    check("moe_combine", rows, weights, order, offsets, exact_dtype=wide)
    check("moe_dispatch_grad", rows, order, offsets, top_k=2, others=True)
    check("moe_dispatch_grad", rows, order, offsets, more, top_k=2, others=True)
    drows, dweights = rt.moe_combine_grad(x, rows, weights, order, offsets)
    expected = op_def("moe_combine_grad").body(x, rows, weights, order, offsets)
    torch.testing.assert_close((drows[:end], dweights), (expected[0][:end], expected[1]))


def test_grouped_outer() -> None:
    total, left, right = numbers(4, 5, 3), numbers(7, 5), numbers(7, 3)
    offsets = torch.tensor([2, 2, 6, 7], dtype=torch.int32)
    expected = total + op_def("grouped_outer").body(left, right, offsets)
    made = rt.grouped_outer_(total, left, right, offsets)
    assert made is total
    torch.testing.assert_close(total, expected)
    total[1] = torch.nan  # as memory may be that nobody cleared; no row is of expert 1
    rt.grouped_outer_(total, left, right, offsets, fresh=True)
    torch.testing.assert_close(total, op_def("grouped_outer").body(left, right, offsets))
    rt.grouped_outer_(wide := torch.full_like(total, torch.nan, dtype=torch.float64), left, right, offsets, fresh=True)
    torch.testing.assert_close(wide, total.double())


def test_what_the_host_reads_is_no_part_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu(torch.Tensor):
        is_cuda = True

    rows, weight, offsets = numbers(5, 6), numbers(2, 6, 8), torch.tensor([2, 5], dtype=torch.int32)
    monkeypatch.setattr(moe, "_GROUPED_DTYPES", {})
    for capturing in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda now=capturing: now)
        if not capturing:
            assert torch.equal(rt.grouped_mm(rows, weight, offsets.as_subclass(OnGpu))[2:], rows[2:] @ weight[1])
            continue
        with pytest.raises(PackageError, match="float32 one after the other, and the host reads where each one ends"):
            rt.grouped_mm(rows, weight, offsets.as_subclass(OnGpu))


def test_numbers_of_no_expert_are_not_counted() -> None:
    counts = rt.expert_counts(torch.tensor([[0, 3], [2, -1], [0, 9]]), num_experts=3)
    assert counts.tolist() == [2, 0, 1]


def test_tokens_of_no_request() -> None:
    """They have no expert in the order, and no sum, whatever their rows hold; also where all or none have a request."""
    logits, bias = numbers(9, 6), numbers(6)
    for end in (0, 5, 9):
        starts = torch.tensor([0, end // 2, end], dtype=torch.int32)
        weights, indices = rt.moe_route(logits, top_k=2)
        check("real_choice", indices, starts, num_experts=6)
        exact_dtype = ({"dtype": DType.F32}, {"dtype": torch.float32})
        check("moe_route_order", logits, bias, starts, top_k=2, ended=True, exact_dtype=exact_dtype)
        *_, order, offsets = rt.moe_route_order(logits, starts, top_k=2, ended=True)
        assert int(offsets[-1]) == 2 * end and order[2 * end :].tolist() == list(range(2 * end, 18))
        rows, weight, biases = numbers(18, 4), numbers(6, 4, 5), numbers(6, 5)
        rows[2 * end :] = torch.nan
        given = rows, weight, weights, order, offsets
        expected = op_def("expert_sum").body(*given, biases, dtype=DType.F32, ended=True)
        torch.testing.assert_close(rt.expert_sum(*given, bias=biases, dtype=torch.float32, ended=True), expected)
        assert bool((expected[end:] == 0).all())


def test_numbers_of_no_expert_come_last_on_a_device_that_nobody_looks_at() -> None:
    """As Triton's kernels have it; on a CPU they are refused before."""
    indices = torch.tensor([[1, -1], [0, 4], [-(2**40), 2], [1, 2**16 + 1]])
    order, ends = moe._by_expert(indices.flatten(), 4)
    expected = op_def("moe_order").body(indices, num_experts=4, others=True)
    assert torch.equal(order, expected[0]) and torch.equal(ends, expected[1])
    assert order[:4].tolist() == [2, 0, 6, 5] and ends.tolist() == [1, 3, 4, 4]
