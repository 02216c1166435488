"""Products with bias, residual or gated unit: numbers against float64, types, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from mgraph.ir.opdef import op_def
from mgraph.ir.types import DType, TensorType


def drawn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("extra", [(), ("bias",), ("residual",), ("bias", "residual")])
def test_linear_is_rounded_once(extra: tuple[str, ...], dtype: torch.dtype) -> None:
    x, weight = drawn(2, 3, 8, dtype=dtype), drawn(5, 8, dtype=dtype)
    more = [drawn(*{"bias": (5,), "residual": (2, 3, 5)}[name], dtype=dtype) for name in extra]
    want = functional.linear(x.double(), weight.double()) + sum(part.double() for part in more)
    found = op_def("linear").body(x, weight, *more, extra=extra)
    assert found.dtype is dtype
    torch.testing.assert_close(
        found.double(), want.to(dtype).double(), rtol=1e-5 if dtype.itemsize == 4 else 8e-3, atol=1e-6
    )


def test_linear_glu_is_the_unit_of_two_products() -> None:
    x, gate = drawn(3, 8, dtype=torch.float32), drawn(5, 8, dtype=torch.float32)
    up = gate.flip(0)
    want = functional.silu(x.double() @ gate.double().t()) * (x.double() @ up.double().t() + 1)
    found = op_def("linear_glu").body(x, gate, up, act="silu", offset=1.0)
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("op", "shapes", "attrs", "message"),
    [
        ("linear", [(2, 8), (5, 7)], {}, "multiplies"),
        ("linear", [(2, 8), (5, 8), (5,)], {}, "does not name"),
        ("linear", [(2, 8), (5, 8), (4,)], {"extra": ("bias",)}, "does not fit"),
        ("linear", [(2, 8), (5, 8), (2, 5), (5,)], {"extra": ("residual", "bias")}, "does not name"),
        ("linear_glu", [(2, 8), (5, 8), (6, 8)], {"act": "silu"}, "one shape"),
    ],
)
def test_what_does_not_fit_is_refused(
    op: str, shapes: list[tuple[int, ...]], attrs: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        op_def(op).result_types([TensorType(DType.F32, shape) for shape in shapes], attrs)
