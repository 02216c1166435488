"""Kernels on a GPU. On tensors of more than 2**31 elements: their last rows come out as they do alone, bit for bit.
Attention and its gradient: every mask and width against float64, on 16-byte boundaries and off them, since the
interpreter runs the same source, but cannot show what a compiler makes wrong of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mgraph.codegen.triton import (
    KernelSpec,
    attention,
    attention_grad,
    build_kernels,
    cross_entropy,
    glu,
    residual_norm,
    rms_norm,
    rope,
)
from mgraph.codegen.triton.cross_entropy import CrossEntropy
from mgraph.codegen.triton.glu import Glu
from mgraph.codegen.triton.rms_norm import RmsNorm
from mgraph.codegen.triton.rope import Rope
from mgraph.runtime import kernels as runtime
from tests.codegen.triton.attention_cases import (
    EVERY,
    displaced,
    draw,
    error,
    gradients,
    operands_of_gradients,
    results,
)

LAST = 3
"""Rows that are compared."""


@dataclass(frozen=True)
class Large:
    """A site, rows and columns of its large inputs, how many of them it has, and all inputs of some rows of those."""

    spec: KernelSpec
    rows: int
    columns: int
    count: int
    inputs: Callable[[list[Tensor]], list[Tensor]]


def _norm(size: int) -> RmsNorm:
    return RmsNorm(size=size, x="bf16", weight="bf16", eps=1e-5)


def _heads(rows: list[Tensor]) -> list[Tensor]:
    """Rows of 32 heads as rope takes them, with tables by position."""
    (x,) = (tensor.view(1, -1, 32, 128).permute(0, 2, 1, 3) for tensor in rows)
    angle = torch.linspace(0, 3, 64, device=x.device).repeat(2)
    table = torch.ones(1, x.shape[2], 1, device=x.device, dtype=torch.bfloat16)
    return [x, (angle.cos() * table).bfloat16(), (angle.sin() * table).bfloat16()]


def _labelled(rows: list[Tensor]) -> list[Tensor]:
    (logits,) = rows
    labels = torch.full((len(logits),), 7, device=logits.device)
    return [logits, labels, torch.ones((), device=logits.device)]


def _weighted(rows: list[Tensor]) -> list[Tensor]:
    return [*rows, torch.linspace(0.5, 1.5, rows[0].shape[1], device=rows[0].device, dtype=torch.bfloat16)]


CASES = {
    "cross entropy": Large(
        cross_entropy.forward_backward("loss", CrossEntropy(128256, "bf16")), 16800, 128256, 1, _labelled
    ),
    "gated unit": Large(glu.forward("unit", Glu(14336, 1, "bf16", "silu")), 150_000, 14336, 2, list),
    "gated unit's gradient": Large(glu.backward("unit_grad", Glu(14336, 1, "bf16", "silu")), 150_000, 14336, 3, list),
    "norm": Large(rms_norm.forward("norm", _norm(4096)), 530_000, 4096, 1, _weighted),
    "norm of a sum": Large(residual_norm.forward("sum_norm", _norm(4096)), 530_000, 4096, 2, _weighted),
    "rotary": Large(
        rope.rotate("rotary", Rope("bf16", "bf16", 128, 128, ("B", "H", "S"), ("", "S"), heads=32)),
        530_000,
        4096,
        1,
        _heads,
    ),
}


def by_rows(made: Tensor, rows: int) -> Tensor | None:
    """The last rows of a result that has one a row."""
    if made.dim() == 4:
        made = made.permute(0, 2, 1, 3).flatten(0, 1)
    return made[rows - LAST :].clone() if made.dim() and len(made) == rows else None


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_last_rows(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    (tmp_path / "manifest.json").write_text(json.dumps({"kernels": build_kernels([case.spec], tmp_path, ["sm_90a"])}))
    runtime.set_device("cuda", strict=True)
    site = getattr(runtime.kernels(tmp_path / "step.py"), case.spec.name)
    large = [torch.zeros(case.rows, case.columns, device="cuda", dtype=torch.bfloat16) for _ in range(case.count)]
    assert large[0].numel() > 2**31
    for tensor in large:
        tensor[-LAST:].normal_()
    small = [tensor[-LAST:].clone() for tensor in large]
    alone = site(*case.inputs(small))
    among = site(*case.inputs(large))
    pairs = [
        (by_rows(whole, case.rows), by_rows(part, LAST))
        for whole, part in zip(*(r if isinstance(r, tuple) else (r,) for r in (among, alone)), strict=True)
    ]
    compared = [(found, wanted) for found, wanted in pairs if found is not None and wanted is not None]
    assert compared and all(torch.equal(found, wanted) for found, wanted in compared)


@pytest.mark.gpu
@pytest.mark.parametrize("name", EVERY)
def test_attention_and_its_gradient(name: str, tmp_path: Path) -> None:
    problem, bounds = EVERY[name], {"bf16": 2e-2, "f16": 2e-3}
    specs = [attention.forward("attend", problem), attention_grad.backward("attend_grad", problem)]
    entries = build_kernels(specs, tmp_path, ["sm_90a"])
    (tmp_path / "manifest.json").write_text(json.dumps({"kernels": entries}), encoding="utf-8")
    runtime.set_device("cuda:0", strict=True)
    bound = runtime.kernels(tmp_path / "step.py")
    inputs, given = draw(name), operands_of_gradients(name)
    wanted = *results(name, inputs), *gradients(name, given)
    for elements in (0, 1):
        found: list[Tensor] = [*bound.attend(*displaced(inputs, elements, "cuda"))]
        found += bound.attend_grad(*displaced(given, elements, "cuda"))
        for got, want in zip(found, wanted, strict=True):
            assert error(got.cpu(), want) <= bounds[problem.dtype], (elements, got.shape)
