"""Hand-written gradients of products and attention against torch's autograd, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

MATMUL = "aten.matmul.default"
ATTENTION = "aten.scaled_dot_product_attention.default"


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((5,), (5,)),
        ((3, 5), (5,)),
        ((5,), (5, 4)),
        ((3, 5), (5, 4)),
        ((2, 3, 5), (5, 4)),
        ((2, 3, 5), (5,)),
        ((5,), (2, 5, 4)),
        ((3, 5), (2, 5, 4)),
        ((2, 1, 3, 5), (7, 5, 4)),
        ((2, 7, 3, 5), (2, 1, 5, 1)),
        ((0, 3, 5), (5, 4)),
    ],
)
def test_matmul(check_op: Any, left: tuple[int, ...], right: tuple[int, ...]) -> None:
    a, b = torch.randn(left, requires_grad=True), torch.randn(right, requires_grad=True)
    check_op(MATMUL, (a, b), {}, torch.matmul)
    check_op(MATMUL, (a.detach(), b), {}, torch.matmul)
    check_op(MATMUL, (a, b.detach()), {}, torch.matmul)


def test_bmm(check_op: Any) -> None:
    a, b = torch.randn(2, 3, 5, requires_grad=True), torch.randn(2, 5, 4, requires_grad=True)
    check_op("aten.bmm.default", (a, b), {}, torch.bmm)


def operands(heads: int, groups: int, rows: int, keys: int) -> list[torch.Tensor]:
    """Query, key and value; the values are wider than the keys."""
    shapes = [(2, heads, rows, 6), (2, groups, keys, 6), (2, groups, keys, 3)]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("rows", "keys"), [(5, 5), (1, 1), (3, 7), (7, 3)])
def test_attention(check_op: Any, heads: int, groups: int, causal: bool, rows: int, keys: int) -> None:
    attrs: dict[str, Any] = {"is_causal": causal, "scale": 0.7} if causal else {}
    attrs |= {"enable_gqa": True} if heads != groups else {}
    call = {**attrs, "enable_gqa": heads != groups}
    check_op(
        ATTENTION,
        operands(heads, groups, rows, keys),
        attrs,
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, **call),
    )


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_attention_under_masks(check_op: Any, groups: int) -> None:
    """A boolean mask with a row that sees nothing, and a number per score that is shared by the batch."""
    seen = torch.rand(2, 1, 5, 7) < 0.5
    seen[..., 0] = True
    seen[1, 0, 2] = False
    given = operands(4, groups, 5, 7)
    gqa = {"enable_gqa": True} if groups < 4 else {}

    def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=bool(gqa))

    check_op(ATTENTION, [*given, seen], gqa, reference)
    check_op(ATTENTION, [*given, torch.randn(1, 4, 5, 7, requires_grad=True)], gqa, reference)
