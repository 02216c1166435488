"""RMS norm: the twins against torch's autograd of the written-out chain, the kernels in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from mgraph.codegen.triton import build_kernels, reference_text, rms_norm
from mgraph.codegen.triton.rms_norm import RmsNorm, Tuning
from tests.codegen.triton.interpret_cases import BROKEN_INTERPRETER

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
SHAPES: list[tuple[int, ...]] = [(), (1,), (3,), (2, 5), (0,)]

PROBLEMS = [
    RmsNorm(40, "f32", "bf16", 1e-5, round="normed"),
    RmsNorm(64, "f32", "f32", 1e-6, round="normed"),
    RmsNorm(65, "f32", "f32", 1e-5, round="normed"),
    RmsNorm(100, "f32", "f32", 1e-5, round="product", offset=1.0),
    RmsNorm(7, "f32", "f32", 1e-5, round="product", offset=1.0),
    RmsNorm(768, "bf16", "bf16", 1e-5, round="normed"),
    RmsNorm(96, "bf16", "bf16", 1e-5, round="normed", offset=1.0),
    RmsNorm(33, "bf16", "f32", 1e-5, round="normed"),
    RmsNorm(128, "bf16", "bf16", 1e-6, round="product", offset=1.0),
    RmsNorm(130, "bf16", "f32", 1e-6, round="product"),
    RmsNorm(48, "f16", "f16", 1e-5, round="normed"),
    RmsNorm(1, "f32", "f32", 1e-5, round="normed"),
]


def load_twins(*specs: Any) -> types.ModuleType:
    module = types.ModuleType("twins")
    exec(reference_text(specs), module.__dict__)
    return module


def eager(problem: RmsNorm, x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The chain as models write it, with `dtype` for the statistics."""
    wide = x.to(dtype)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + problem.eps)
    if problem.round == "product":
        return (normed * (weight.to(dtype) + problem.offset)).to(x.dtype)
    return ((weight.to(dtype) + problem.offset) * normed.to(x.dtype).to(dtype)).to(x.dtype)


def run_eager(
    problem: RmsNorm, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, lift: bool
) -> list[torch.Tensor]:
    """y, dx and dweight by autograd; `lift` computes all in float64."""
    leaf_x, leaf_weight = (tensor.to(torch.float64 if lift else tensor.dtype, copy=True) for tensor in (x, weight))
    leaf_x.requires_grad_()
    leaf_weight.requires_grad_()
    wide = torch.float64 if lift else torch.float32
    y = eager(problem, leaf_x, leaf_weight, wide)
    return [y.detach(), *torch.autograd.grad(y, [leaf_x, leaf_weight], dy.to(y.dtype))]


def relative(got: torch.Tensor, want: torch.Tensor, scale: torch.Tensor) -> float:
    """The error in the Frobenius norm, relative to `scale`'s."""
    return float((got.double() - want.double()).norm() / scale.double().norm().clamp_min(1e-30))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: f"{p.size}-{p.x}-{p.weight}-{p.round}-{p.offset}")
def test_twin_equals_autograd(problem: RmsNorm, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(problem.size)
    x = torch.randn(*shape, problem.size, generator=generator, dtype=torch.float64).to(DTYPES[problem.x])
    dy = torch.randn(*shape, problem.size, generator=generator, dtype=torch.float64).to(DTYPES[problem.x])
    weight = (1 + torch.randn(problem.size, generator=generator, dtype=torch.float64)).to(DTYPES[problem.weight])
    twins = load_twins(rms_norm.forward("fwd", problem), rms_norm.backward("bwd", problem))
    before = [tensor.clone() for tensor in (dy, x, weight)]
    y, rstd = twins.fwd(x, weight)
    dx, dweight = twins.bwd(dy, x, weight, rstd)
    assert rstd.shape == (*shape, 1) and rstd.dtype == torch.float32
    for tensor, old in zip((dy, x, weight), before, strict=True):
        assert torch.equal(tensor, old), "a twin wrote into its input"
    lifted = run_eager(problem, dy, x, weight, lift=True)
    native = run_eager(problem, dy, x, weight, lift=False)
    floor = {"f32": 1e-6, "bf16": 1e-3, "f16": 1e-4}
    # dx is a difference of two terms that nearly cancel in short rows; its error is relative to the first of them.
    scales = (lifted[0], dy.double() * (weight.double() + problem.offset) * rstd.double(), lifted[2])
    dtypes = (problem.x, problem.x, problem.weight)
    for got, plain, exact, scale, dtype in zip((y, dx, dweight), native, lifted, scales, dtypes, strict=True):
        assert got.dtype == DTYPES[dtype] == plain.dtype and got.shape == exact.shape
        assert relative(got, exact, scale) <= 1.5 * relative(plain, exact, scale) + floor[dtype]


def test_twin_rounds_where_eager_rounds() -> None:
    """In bf16 the forward agrees with eager bit for bit but where rstd, by another order of sums, tips a rounding."""
    problem = RmsNorm(256, "bf16", "bf16", 1e-5, round="normed")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 256, generator=generator).bfloat16()
    weight = (1 + torch.randn(256, generator=generator)).bfloat16()
    y, _ = load_twins(rms_norm.forward("fwd", problem)).fwd(x, weight)
    want = eager(problem, x, weight, torch.float32)
    assert (y != want).float().mean() < 1e-3


def test_twin_takes_strided_input() -> None:
    problem = RmsNorm(48, "f32", "f32", 1e-5, round="normed")
    base = torch.randn(6, 96, generator=torch.Generator().manual_seed(1))
    weight = torch.ones(48)
    fwd = load_twins(rms_norm.forward("fwd", problem)).fwd
    torch.testing.assert_close(fwd(base[:, ::2], weight), fwd(base[:, ::2].contiguous(), weight))


def test_refusals_name_the_reason() -> None:
    assert rms_norm.refusal(RmsNorm(64, "f32", "f32", 1e-5, round="normed")) is None
    assert "f64" in str(rms_norm.refusal(RmsNorm(64, "f64", "f64", 1e-5, round="normed")))
    assert "32768" in str(rms_norm.refusal(RmsNorm(32768, "bf16", "bf16", 1e-5, round="normed")))


def test_alignment_is_claimed_only_where_rows_keep_it() -> None:
    assert RmsNorm(8, "bf16", "bf16", 1e-5, round="normed").aligned
    assert not RmsNorm(4, "bf16", "f32", 1e-5, round="normed").aligned
    assert not RmsNorm(33, "f32", "f32", 1e-5, round="normed").aligned


@pytest.mark.skipif(BROKEN_INTERPRETER, reason="the interpreter cannot run with this NumPy")
def test_kernels_in_the_interpreter(tmp_path: Path) -> None:
    """Every tile shape (one row, many, ragged columns) against float64, through the runtime's call path."""
    problems = {
        "a": (RmsNorm(64, "f32", "f32", 1e-5, round="normed"), Tuning(4, 4, 1, 1)),
        "b": (RmsNorm(100, "f32", "f32", 1e-5, round="product"), Tuning(2, 4, 1, 2)),
        "c": (RmsNorm(129, "bf16", "bf16", 1e-5, round="normed"), Tuning(1, 4, 2, 1)),
        "d": (RmsNorm(33, "bf16", "f32", 1e-5, round="normed"), Tuning(4, 4, 1, 1)),
        "e": (RmsNorm(128, "bf16", "bf16", 1e-5, round="product"), None),
        "f": (RmsNorm(5, "f32", "f32", 1e-5, round="normed"), Tuning(1, 4, 1, 1)),
    }
    specs = []
    for suffix, (problem, tuning) in problems.items():
        specs += [
            rms_norm.forward(f"rms_norm_fwd_{suffix}", problem, tuning),
            rms_norm.backward(f"rms_norm_bwd_{suffix}", problem, tuning),
        ]
    entries = build_kernels(specs, tmp_path, archs=())
    (tmp_path / "manifest.json").write_text(json.dumps({"kernels": entries}))
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("interpret_rms_norm.py")), str(tmp_path)],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert len(results) == 4 * len(problems)
    for result in results:
        # The interpreter cuts to bf16 where a GPU rounds, so each of the up to two roundings costs twice as much here.
        bound = 1e-6 if result["dtypes"]["x"] == "f32" else 1e-2
        assert all(value <= bound for value in result["errors"].values()), result
