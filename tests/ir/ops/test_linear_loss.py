"""linear_cross_entropy_with_grad against torch's linear, cross entropy and autograd; the runtime's loop likewise."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mgraph.ir.opdef import op_def
from mgraph.ir.ops.linear_loss import linear_cross_entropy_with_grad
from mgraph.ir.types import DType, TensorType
from mgraph.runtime import v1 as rt

Case = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def drawn(dtype: torch.dtype) -> Case:
    """A total, x of 2x7 rows of 5, a weight of 9 rows, labels of which some are ignored, and a cotangent."""
    torch.manual_seed(0)
    total, x, weight = torch.randn(9, 5), torch.randn(2, 7, 5).to(dtype), torch.randn(9, 5).to(dtype)
    labels = torch.randint(6, (14,))
    labels[4:9] = 3
    return total.double() if dtype is torch.float64 else total, x, weight, labels, torch.tensor(1.5)


def expected(total: Tensor, x: Tensor, weight: Tensor, labels: Tensor, dsum: Tensor) -> tuple[Tensor, ...]:
    """By autograd, in float64."""
    x, weight = x.double().requires_grad_(), weight.double().requires_grad_()
    loss = F.cross_entropy((x @ weight.T).flatten(0, 1)[:, :6], labels, ignore_index=3, reduction="sum")
    dx, dweight = torch.autograd.grad(loss * dsum, (x, weight))
    return total + dweight, loss.detach(), dx


def runtime_form(*case: Tensor, rows: int, **options: object) -> tuple[Tensor, ...]:
    """The loop in place as a function."""
    total = case[0].clone()
    made = rt.linear_cross_entropy_with_grad_(total, *case[1:], rows=rows, **options)  # type: ignore[arg-type]
    return total, *made


def loss_over_logits(logits: Tensor, labels: Tensor, dsum: Tensor) -> tuple[Tensor, ...]:
    """What a kernel site of the loss does."""
    return rt.cross_entropy_with_grad(logits, labels, dsum, ignore_index=3, classes=6, out=logits)


FORMS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "meaning": functools.partial(linear_cross_entropy_with_grad, ignore_index=3, classes=6),
    "loop": functools.partial(runtime_form, ignore_index=3, classes=6),
    "kernel": functools.partial(runtime_form, loss=loss_over_logits),
}


@pytest.mark.parametrize("rows", [1, 4, 7, 100])
@pytest.mark.parametrize("form", FORMS)
def test_in_float64(form: str, rows: int) -> None:
    case = drawn(torch.float64)
    for made, wanted in zip(FORMS[form](*case, rows=rows), expected(*case), strict=True):
        torch.testing.assert_close(made, wanted, rtol=1e-12, atol=1e-12, check_dtype=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
def test_in_low_precision(form: str, dtype: torch.dtype) -> None:
    case = drawn(dtype)
    error = 4 * torch.finfo(dtype).eps
    total, loss, dx = FORMS[form](*case, rows=4)
    assert total.dtype == loss.dtype == torch.float32 and dx.dtype == dtype
    for made, wanted in zip((total, loss, dx), expected(*case), strict=True):
        assert (made.double() - wanted).abs().max() <= error * max(1.0, float(wanted.abs().max()))


@pytest.mark.parametrize("form", FORMS)
def test_only_ignored_labels(form: str) -> None:
    total, x, weight, labels, dsum = drawn(torch.float32)
    made = FORMS[form](total, x, weight, torch.full_like(labels, 3), dsum, rows=4)
    assert torch.equal(made[0], total) and made[1] == 0 and not made[2].any()


def test_no_more_logits_than_rows() -> None:
    """The kernel is handed at most `rows` rows, always in the same memory."""
    seen: list[tuple[int, int]] = []

    def loss(logits: Tensor, labels: Tensor, dsum: Tensor) -> tuple[Tensor, ...]:
        seen.append((len(logits), logits.data_ptr()))
        return loss_over_logits(logits, labels, dsum)

    runtime_form(*drawn(torch.float32), rows=4, loss=loss)
    assert [count for count, _ in seen] == [4, 4, 4, 2] and len({place for _, place in seen}) == 1


def test_types() -> None:
    def types(*shapes: tuple[int, ...]) -> list[TensorType]:
        dtypes = (DType.F32, DType.BF16, DType.BF16, DType.I64, DType.F32)
        return [TensorType(d, s) for d, s in zip(dtypes, shapes, strict=True)]

    definition = op_def("linear_cross_entropy_with_grad")
    fine = types((9, 5), (2, 7, 5), (9, 5), (14,), ())
    assert [str(t) for t in definition.result_types(fine, {"rows": 4})] == ["f32[9, 5]", "f32[]", "bf16[2, 7, 5]"]
    for wrong, rows in (
        (types((9, 5), (2, 7, 5), (9, 4), (14,), ()), 4),
        (types((8, 5), (2, 7, 5), (9, 5), (14,), ()), 4),
        (types((9, 5), (2, 7, 5), (9, 5), (15,), ()), 4),
        (types((9, 5), (2, 7, 5), (9, 5), (14,), (1,)), 4),
        (fine, 0),
    ):
        with pytest.raises(ValueError):
            definition.result_types(wrong, {"rows": rows})
