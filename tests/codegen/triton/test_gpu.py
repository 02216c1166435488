"""Kernels on a GPU. On tensors of more than 2**31 elements: their last rows come out as they do alone, bit for bit, or
as `far_cases.py` says they should.
Attention and its gradient: every mask and width against float64, on 16-byte boundaries and off them, since the
interpreter runs the same source, but cannot show what a compiler makes wrong of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu import cases_region
from mgraph.codegen.triton import (
    KernelSpec,
    attention,
    attention_grad,
    build_kernels,
    cross_entropy,
    cut_keys,
    glu,
    norm_rope,
    perturb,
    residual_norm,
    rms_norm,
    rope,
)
from mgraph.codegen.triton.cross_entropy import CrossEntropy
from mgraph.codegen.triton.glu import Glu
from mgraph.codegen.triton.likeliest import Likeliest
from mgraph.codegen.triton.norm_rope import NormRope
from mgraph.codegen.triton.rms_norm import RmsNorm
from mgraph.codegen.triton.rope import Rope
from mgraph.runtime import kernels as runtime
from mgraph.runtime import v1 as rt
from tests.codegen.triton import cut_cases
from tests.codegen.triton.attention_cases import (
    EVERY,
    displaced,
    draw,
    error,
    gradients,
    operands_of_gradients,
    results,
)
from tests.codegen.triton.far_case import check
from tests.codegen.triton.far_case import results as results_of
from tests.codegen.triton.far_cases import CASES as FAR

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


def _differentiated(rows: list[Tensor]) -> list[Tensor]:
    """With weights, and an rstd that is the same for all rows."""
    return [*_weighted(rows), torch.full((len(rows[0]), 1), 0.75, device=rows[0].device)]


def _normed_heads(rows: list[Tensor]) -> list[Tensor]:
    x, cos, sin = _heads(rows)
    return [x, torch.linspace(0.5, 1.5, 128, device=x.device, dtype=x.dtype), cos, sin]


def _differentiated_heads(rows: list[Tensor]) -> list[Tensor]:
    dy, x = rows
    return [_heads([dy])[0], *_normed_heads([x]), torch.full((1, 32, len(x), 1), 0.75, device=x.device)]


def _region(rows: list[Tensor]) -> list[Tensor]:
    """A layer norm with weight and bias."""
    scale = _weighted(rows)[-1]
    return [*rows, scale, scale - 1]


ROPE = Rope("bf16", "bf16", 128, 128, ("B", "H", "S"), ("", "S"), heads=32)
REGIONS = {case.id: case.spec for case in cases_region.CASES}

CASES = {
    "cross entropy": Large(
        cross_entropy.forward_backward("loss", CrossEntropy(128256, "bf16")), 16800, 128256, 1, _labelled
    ),
    "gated unit": Large(glu.forward("unit", Glu(14336, 1, "bf16", "silu")), 150_000, 14336, 2, list),
    "gated unit's gradient": Large(glu.backward("unit_grad", Glu(14336, 1, "bf16", "silu")), 150_000, 14336, 3, list),
    "norm": Large(rms_norm.forward("norm", _norm(4096)), 530_000, 4096, 1, _weighted),
    "norm of a sum": Large(residual_norm.forward("sum_norm", _norm(4096)), 530_000, 4096, 2, _weighted),
    "norm's gradient": Large(rms_norm.backward("norm_grad", _norm(4096)), 530_000, 4096, 2, _differentiated),
    "gradient of a norm of a sum": Large(
        residual_norm.backward("sum_norm_grad", _norm(4096)), 530_000, 4096, 3, _differentiated
    ),
    "rotary": Large(rope.rotate("rotary", ROPE), 530_000, 4096, 1, _heads),
    "norm and rotary": Large(
        norm_rope.forward("norm_rotary", NormRope(_norm(128), ROPE)), 530_000, 4096, 1, _normed_heads
    ),
    "gradient of norm and rotary": Large(
        norm_rope.backward("norm_rotary_grad", NormRope(_norm(128), ROPE)), 530_000, 4096, 2, _differentiated_heads
    ),
    "region": Large(REGIONS["region-layer-norm"], 530_000, 4096, 1, _region),
    "region of three": Large(REGIONS["region-three"], 530_000, 4096, 3, list),
}


def by_rows(made: Tensor, rows: int) -> Tensor | None:
    """The last rows of a result that has one a row."""
    if made.dim() == 4:
        made = made.permute(0, 2, 1, 3).flatten(0, 1)
    return made[rows - LAST :].clone() if made.dim() and len(made) == rows else None


def check_last_rows(among: Any, alone: Any, rows: int) -> None:
    """What a site gives for the last of so many rows is what it gives for them alone. A weight's gradient, to which the
    other rows, of zeros, add nothing, is summed in another order."""
    pairs = list(zip(*(made if isinstance(made, tuple) else (made,) for made in (among, alone)), strict=True))
    of_rows = ((by_rows(whole, rows), by_rows(part, LAST)) for whole, part in pairs)
    compared = [(found, wanted) for found, wanted in of_rows if found is not None and wanted is not None]
    assert compared and all(torch.equal(found, wanted) for found, wanted in compared)
    for whole, part in pairs:
        if whole.dim() == 1 and whole.shape == part.shape:
            torch.testing.assert_close(whole, part)


def bound(spec: KernelSpec, directory: Path) -> Callable[..., Any]:
    """A site, built for this GPU."""
    entries = build_kernels([spec], directory, ["sm_90a"])
    (directory / "manifest.json").write_text(json.dumps({"kernels": entries}))
    runtime.set_device("cuda", strict=True)
    site: Callable[..., Any] = getattr(runtime.kernels(directory / "step.py"), spec.name)
    return site


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_last_rows(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    site = bound(case.spec, tmp_path)
    large = [torch.zeros(case.rows, case.columns, device="cuda", dtype=torch.bfloat16) for _ in range(case.count)]
    assert large[0].numel() > 2**31
    for tensor in large:
        tensor[-LAST:].normal_()
    alone = site(*case.inputs([tensor[-LAST:].clone() for tensor in large]))
    check_last_rows(site(*case.inputs(large)), alone, case.rows)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAR)
def test_far_ends(name: str, tmp_path: Path) -> None:
    build, large, _ = FAR[name]
    case = build(*large)
    inputs, wanted = case.draw(torch.device("cuda"))
    made = bound(case.spec, tmp_path)(*inputs)
    check(case, results_of(case, inputs, made), wanted)


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


@pytest.mark.gpu
@pytest.mark.parametrize("times", [1, 16])
def test_cuts_of_many_rows(times: int, tmp_path: Path) -> None:
    """So many that the warps of a program are far apart; a second call gives the same."""
    problem, device = Likeliest(50257, "f32"), torch.device("cuda", 0)
    site = bound(cut_keys.build("cut", problem), tmp_path)
    given = tuple(tensor.to(device) for tensor in cut_cases.draw(problem, times, times))
    made = site(*given)
    assert torch.equal(site(*given), made)
    cut_cases.check(made.cpu(), tuple(tensor.cpu() for tensor in given), "cut")


@pytest.mark.gpu
def test_noise_is_that_of_the_cpu(tmp_path: Path) -> None:
    problem, device = Likeliest(50257, "f32"), torch.device("cuda", 0)
    site = bound(perturb.build("perturb", problem), tmp_path)
    each = torch.arange(200)
    given = torch.randn(200, 50257), 0.5 + each / 100, each * 2**50, each * 2**31
    torch.testing.assert_close(site(*(t.to(device) for t in given)).cpu(), rt.perturb(*given), rtol=1e-5, atol=1e-5)
