"""Products of rows with weights: who makes them for how many rows, and that all make the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mgraph.runtime.linear import MOST_ROWS, MOST_UNIT_ROWS, linear, linear_glu

ROWS = sorted({0, *(most + more for most in (MOST_ROWS, MOST_UNIT_ROWS) for more in (0, 1))})


def draw(*shapes: tuple[int, ...]) -> list[Tensor]:
    """Random tensors in f32."""
    generator = torch.Generator().manual_seed(len(shapes))
    return [torch.randn(*shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("extra", [(), ("bias",), ("residual",), ("bias", "residual")])
def test_a_few_rows_are_for_the_kernel_and_more_for_torch(rows: int, extra: tuple[str, ...]) -> None:
    x, weight, bias, residual = draw((1, rows, 5), (7, 5), (7,), (1, rows, 7))
    more = [{"bias": bias, "residual": residual}[name] for name in extra]
    kept = residual.clone()
    want = (x.double() @ weight.double().t() + sum(part.double() for part in more)).float()
    called = []

    def site(*given: Tensor) -> Tensor:
        called.append(given)
        return want

    for few in (site, None):
        torch.testing.assert_close(linear(x, weight, *more, extra=extra, few=few), want)
    assert len(called) == (0 < rows <= MOST_ROWS)
    assert all(given == (x, weight, *more) or len(given) == 2 + len(more) for given in called)
    assert torch.equal(residual, kept)


@pytest.mark.parametrize("rows", ROWS)
def test_units_of_more_rows_take_the_kernel_of_the_unit(rows: int) -> None:
    x, gate, up = draw((rows, 5), (7, 5), (7, 5))
    want = functional.silu(x @ gate.t()) * (x @ up.t())
    called = []

    def few(*given: Tensor) -> Tensor:
        called.append("few")
        return want

    def unit(gate: Tensor, up: Tensor) -> Tensor:
        called.append("unit")
        return functional.silu(gate) * up

    torch.testing.assert_close(linear_glu(x, gate, up, act="silu", few=few, unit=unit), want)
    assert called == ["few" if 0 < rows <= MOST_UNIT_ROWS else "unit"]
    torch.testing.assert_close(linear_glu(x, gate, up, act="silu"), want)
