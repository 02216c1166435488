"""Products by TensorRT: its backend of torch.compile replaced by a stub that runs the graph that it is given."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from mgraph.runtime import tensorrt_products
from mgraph.runtime import v1 as rt

BUILT: list[list[tuple[int, ...]]] = []
"""The shapes of the inputs of each engine that the stub was asked for."""


def stub_backend(graph: fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
    """The graph as it is; a real backend knows no calls but those of torch."""
    assert all(not node.op.startswith("call_module") for node in graph.graph.nodes)
    BUILT.append([tuple(t.shape) for t in given if isinstance(t, Tensor)])
    run: Callable[..., Any] = graph.forward
    return run


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from torch._dynamo.backends import registry

    def imported() -> None:
        monkeypatch.setitem(registry._COMPILER_FNS, "torch_tensorrt", stub_backend)
        monkeypatch.setitem(registry._BACKENDS, "torch_tensorrt", None)

    monkeypatch.setattr(tensorrt_products, "_library", imported)
    monkeypatch.setattr(tensorrt_products, "_is_there", lambda device: True)
    monkeypatch.setattr(tensorrt_products, "_engines", {})
    BUILT.clear()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def draw(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("rows", [1, 5])
def test_products(rows: int) -> None:
    x, weight, bias, residual = draw(rows, 6), draw(7, 6), draw(7), draw(rows, 7)
    kept = residual.clone()
    found = rt.linear(x, weight, bias, residual, extra=("bias", "residual"), by="tensorrt")
    wanted = x.double() @ weight.double().t() + bias + residual
    assert torch.allclose(found.double(), wanted, atol=1e-5)
    assert torch.equal(residual, kept) and len(BUILT) == 1
    assert torch.equal(rt.linear(x + 0, weight, bias, residual, extra=("bias", "residual"), by="tensorrt"), found)
    assert len(BUILT) == 1, "one engine a shape"
    rt.linear(draw(rows + 1, 6), weight, bias, draw(rows + 1, 7), extra=("bias", "residual"), by="tensorrt")
    assert len(BUILT) == 2 and (rows + 1, 6) in BUILT[1]


@pytest.mark.usefixtures("library")
def test_units() -> None:
    x, gate, up = draw(3, 6), draw(8, 6), draw(8, 6)
    found = rt.linear_glu(x, gate, up, act="silu", by="tensorrt")
    wanted = torch.nn.functional.silu(x.double() @ gate.double().t()) * (x.double() @ up.double().t())
    assert torch.allclose(found.double(), wanted, atol=1e-5) and len(BUILT) == 1


def test_where_it_does_not_run_torch_does_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt_products, "_said", set())
    x, weight = draw(3, 6), draw(7, 6)
    with pytest.warns(RuntimeWarning, match="it is not installed, or not for cpu; torch does"):
        assert torch.equal(rt.linear(x, weight, by="tensorrt"), rt.linear(x, weight))
    with pytest.warns(RuntimeWarning, match=r"rows are torch\.float64"):
        assert not tensorrt_products.fits(x.double())
    with pytest.warns(RuntimeWarning, match="it has no gradients"):
        assert not tensorrt_products.fits(x.clone().requires_grad_())
    with pytest.warns(RuntimeWarning, match="there are no rows"):
        assert not tensorrt_products.fits(x[:0])
    assert not tensorrt_products._is_there(torch.device("cuda", 0)), "it is not installed here"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert tensorrt_products._is_there(torch.device("cuda", 0))
