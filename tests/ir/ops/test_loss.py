"""cross_entropy against torch's, with ignored rows and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mgraph.ir.opdef import op_def

LABELS = {"mixed": [0, -100, 6, 3, -100], "one": [5], "all ignored": [-100, -100], "none": []}


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
def test_values_and_gradient(check_op: Any, labels: list[int]) -> None:
    logits = (4 * torch.randn(len(labels), 7)).requires_grad_()

    def reference(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return functional.cross_entropy(logits, labels, reduction="sum"), logits.logsumexp(-1)

    check_op("cross_entropy", (logits, torch.tensor(labels, dtype=torch.int64)), {"ignore_index": -100}, reference)


def test_own_ignore_index_and_low_precision(run_op: Any) -> None:
    logits, labels = torch.randn(6, 9).bfloat16().requires_grad_(), torch.tensor([1, 3, 3, 8, 0, 3])
    (total, lse), (dlogits, none) = run_op("cross_entropy", (logits, labels), {"ignore_index": 3}, torch.tensor(2.0))
    wide = logits.detach().float().requires_grad_()
    expected = functional.cross_entropy(wide, labels, reduction="sum", ignore_index=3)
    torch.testing.assert_close(total, expected.detach())
    assert none is None
    assert lse.dtype == torch.float32
    (grad,) = torch.autograd.grad(2 * expected, wide)
    torch.testing.assert_close(dlogits, grad.bfloat16())


def test_padded_columns_count_for_nothing(run_op: Any) -> None:
    logits = torch.randn(5, 9, requires_grad=True)
    labels = torch.tensor([0, 3, -100, 5, 2])
    (total, lse), (dlogits, none) = run_op("cross_entropy", (logits, labels), {"classes": 6}, torch.tensor(2.0))
    wide = logits.detach().clone().requires_grad_()
    expected = functional.cross_entropy(wide[:, :6], labels, reduction="sum")
    expected.backward(torch.tensor(2.0))
    torch.testing.assert_close(total, expected.detach())
    torch.testing.assert_close(lse, wide[:, :6].logsumexp(-1).detach())
    torch.testing.assert_close(dlogits, wide.grad)
    assert none is None


def test_with_grad_is_both() -> None:
    logits, labels, dsum = torch.randn(5, 9).bfloat16(), torch.tensor([0, 3, 2, 5, 2]), torch.tensor(2.0)
    attrs = {"ignore_index": 2, "classes": 6}
    total, lse, dlogits = op_def("cross_entropy_with_grad").body(logits, labels, dsum, **attrs)
    wide = logits.float().requires_grad_()
    expected = functional.cross_entropy(wide[:, :6], labels, reduction="sum", ignore_index=2)
    expected.backward(dsum)
    torch.testing.assert_close(total, expected.detach())
    torch.testing.assert_close(lse, wide[:, :6].logsumexp(-1).detach())
    assert wide.grad is not None
    torch.testing.assert_close(dlogits, wide.grad.bfloat16())
