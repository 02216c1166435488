"""The runtime's semantic ops against the bodies that define them, at awkward sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mgraph.ir.opdef import op_def
from mgraph.runtime import v1 as rt


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def check(name: str, *operands: Tensor, exact_dtype: Any = None, **attrs: Any) -> None:
    torch.manual_seed(1)
    expected = op_def(name).body(*operands, **(attrs | exact_dtype[0] if exact_dtype else attrs))
    made = getattr(rt, name)(*operands, **(attrs | exact_dtype[1] if exact_dtype else attrs))
    pairs = zip(made, expected, strict=True) if isinstance(expected, tuple) else [(made, expected)]
    for ours, theirs in pairs:
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        tolerance = 2e-2 if ours.dtype == torch.bfloat16 else 2e-5
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("act", ["silu", "gelu_tanh", "gelu_erf", "quick_gelu"])
def test_glu(act: str, dtype: torch.dtype) -> None:
    gate, up, dy = (numbers(3, 7, dtype=dtype) for _ in range(3))
    check("glu", gate, up, act=act)
    check("glu_grad", dy, gate, up, act=act)
    check("glu", gate, up, act=act, limit=0.5, offset=1.0)
    check("glu_grad", dy, gate, up, act=act, limit=0.5, offset=1.0)
    check("squared_relu", gate)
    check("squared_relu_grad", dy, gate)


@pytest.mark.parametrize("width", [8, 4])
@pytest.mark.parametrize("inverse", [False, True])
def test_rope(width: int, inverse: bool) -> None:
    x, cos, sin = numbers(2, 3, 5, 8).transpose(1, 2), numbers(3, width), numbers(3, width)
    check("rope", x, cos, sin, inverse=inverse)
    check("rope", x.bfloat16(), cos, sin, inverse=inverse)
    check("rope_table_grad", numbers(2, 5, 3, 8), x, cos, sin)
    check("rope", x, cos, sin, inverse=inverse, style="interleaved")
    check("rope_table_grad", numbers(2, 5, 3, 8), x, cos, sin, style="interleaved")


@pytest.mark.parametrize("rows", [1, 37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy(rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mgraph.runtime.ops._CHUNK_ELEMENTS", 50)
    logits, labels = numbers(rows, 11, dtype=dtype) * 5, torch.randint(11, (rows,))
    labels[::3] = -100
    check("cross_entropy", logits, labels)
    lse = logits.float().logsumexp(-1)
    check("cross_entropy_grad", torch.tensor(0.7), logits, labels, lse)
    expected = rt.cross_entropy_grad(torch.tensor(0.7), logits, labels, lse)
    check("cross_entropy_with_grad", logits, labels, torch.tensor(0.7))
    both = rt.cross_entropy_with_grad(logits.clone(), labels, torch.tensor(0.7))
    assert torch.equal(both[0], rt.cross_entropy(logits, labels)[0]) and torch.equal(both[2], expected)
    taken = logits.clone()
    assert rt.cross_entropy_with_grad(taken, labels, torch.tensor(0.7), out=taken)[2] is taken
    assert torch.equal(taken, expected)
    assert torch.equal(rt.cross_entropy_grad(torch.tensor(0.7), logits, labels, lse, out=logits), expected)
    assert torch.equal(logits, expected)


def test_cross_entropy_of_padded_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mgraph.runtime.ops._CHUNK_ELEMENTS", 50)
    logits, labels = numbers(9, 11) * 5, torch.randint(8, (9,))
    total, lse = rt.cross_entropy(logits, labels, classes=8)
    torch.testing.assert_close((total, lse), rt.cross_entropy(logits[:, :8].clone(), labels))
    check("cross_entropy_grad", torch.tensor(0.7), logits, labels, lse, classes=8)
    expected = rt.cross_entropy_grad(torch.tensor(0.7), logits, labels, lse, classes=8)
    assert not expected[:, 8:].any()
    assert torch.equal(rt.cross_entropy_grad(torch.tensor(0.7), logits, labels, lse, classes=8, out=logits), expected)


def test_embedding_grad() -> None:
    total, grad, indices = numbers(6, 3), numbers(2, 4, 3), torch.randint(6, (2, 4))
    expected = total + torch.ops.aten.embedding_dense_backward(grad, indices, 6, -1, False)
    torch.testing.assert_close(rt.embedding_grad_(total, grad, indices), expected)


def test_norm_copies_and_zeros() -> None:
    tensors = [numbers(3, 2), numbers(5)]
    torch.testing.assert_close(rt.global_norm(tensors), op_def("global_norm").body(*tensors))
    for max_norm in (0.0, 0.1, 100.0):
        check("gradient_scale", torch.tensor(3.0), torch.tensor(7), max_norm=max_norm)
    targets = [torch.zeros(3, 2, dtype=torch.bfloat16), torch.zeros(5)]
    rt.copy_(targets, tensors)
    assert torch.equal(targets[0], tensors[0].bfloat16()) and torch.equal(targets[1], tensors[1])
    rt.zero_(tensors)
    assert not any(t.any() for t in tensors)


@pytest.mark.parametrize("total_dtype", [torch.float32, torch.bfloat16])
def test_mm_writes_over_whatever_is_there(total_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(5, 7, generator=generator).bfloat16() for _ in range(2))
    total = torch.full((5, 5), float("nan"), dtype=total_dtype)
    assert rt.mm_(total, left, right.t()) is total
    assert torch.equal(total, rt.addmm_(torch.zeros(5, 5, dtype=total_dtype), left, right.t()))
    torch.testing.assert_close(total.double(), left.double() @ right.double().t(), rtol=2**-7, atol=2**-7)
