"""Runs emitted RMS norm kernels in Triton's interpreter and prints their errors against float64, as JSON.

A program of its own, since interpreted and compiled kernels cannot share a process: `python interpret_rms_norm.py PKG`
with TRITON_INTERPRET=1, where PKG holds the manifest, `kernels.py` and `reference.py`. The sites run through the
runtime's own call path, with the interpreter in place of a GPU; a site without binaries is run by the JIT launcher.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from mgraph.runtime import kernels as runtime

CASES: list[dict[str, Any]] = [
    {"leading": [1], "strided": False},
    {"leading": [3], "strided": False},
    {"leading": [2, 5], "strided": False},
    {"leading": [7], "strided": True},
]


class Interpreter:
    """A device of three multiprocessors whose launches all go through Triton's interpreter."""

    torch_device = torch.device("cpu")
    capability = (9, 0)
    cuda = 13
    multiprocessors = 3

    def load(self, cubin: bytes, symbol: str, shared: int) -> Any:
        raise AssertionError("the interpreter loads no binaries")

    def room(self, kernel: Any, threads: int, shared: int) -> int:
        raise AssertionError("the interpreter has no multiprocessors")

    def launch(
        self, kernel: Any, grid: tuple[int, ...], threads: int, shared: int, parameters: int, early: bool
    ) -> None:
        raise AssertionError("the interpreter launches no binaries")


def error(got: torch.Tensor, want: torch.Tensor, scale: torch.Tensor) -> float:
    """The error in the Frobenius norm, relative to `scale`'s."""
    assert got.shape == want.shape, f"{list(got.shape)} in place of {list(want.shape)}"
    return float((got.double() - want).norm() / scale.norm())


def run(
    sites: runtime.Kernels, suffix: str, size: int, case: dict[str, Any], dtypes: dict[str, str]
) -> dict[str, float]:
    """Errors of y, rstd, dx and dweight for one kernel pair and one input shape; eps 1e-5, no offset."""
    generator = torch.Generator().manual_seed(size)
    shape = [*case["leading"], size * (2 if case["strided"] else 1)]

    def draw(dtype: str) -> torch.Tensor:
        tensor = torch.randn(shape, generator=generator).to(runtime.DTYPES[dtype])
        return tensor[..., ::2] if case["strided"] else tensor

    x, dy = draw(dtypes["x"]), draw(dtypes["x"])
    weight = (1 + 0.5 * torch.randn(size, generator=generator)).to(runtime.DTYPES[dtypes["weight"]])
    wide_x = x.to(torch.float64, copy=True).requires_grad_()
    wide_weight = weight.to(torch.float64, copy=True).requires_grad_()
    rstd = torch.rsqrt(wide_x.pow(2).mean(-1, keepdim=True) + 1e-5)
    y = wide_weight * (wide_x * rstd)
    dx, dweight = torch.autograd.grad(y, [wide_x, wide_weight], dy.double())
    got_y, got_rstd = getattr(sites, f"rms_norm_fwd_{suffix}")(x, weight)
    got_dx, got_dweight = getattr(sites, f"rms_norm_bwd_{suffix}")(dy, x, weight, got_rstd)
    y, rstd = y.detach(), rstd.detach()
    return {
        "y": error(got_y, y, y),
        "rstd": error(got_rstd, rstd, rstd),
        # A difference of two terms that nearly cancel in short rows; relative to the first of them.
        "dx": error(got_dx, dx, dy.double() * weight.double() * rstd),
        "dweight": error(got_dweight, dweight, dweight),
    }


def main(directory: Path) -> None:
    entries = json.loads((directory / "manifest.json").read_text())["kernels"]
    twins = runtime._import_file(directory / "reference.py")
    sites = runtime.bind(entries, directory, twins, Interpreter(), strict=True, jit=True)
    assert set(sites.providers.values()) == {"jit"}, sites.providers
    rows = []
    for entry in entries:
        if entry["name"].startswith("rms_norm_fwd_"):
            suffix = entry["name"].removeprefix("rms_norm_fwd_")
            size = entry["inputs"][0]["shape"][-1]
            dtypes = {
                "x": entry["inputs"][0]["dtype"],
                "weight": entry["inputs"][1]["dtype"],
            }
            for case in CASES:
                errors = run(sites, suffix, size, case, dtypes)
                rows.append({"kernel": suffix, "size": size, "dtypes": dtypes, **case, "errors": errors})
    json.dump(rows, sys.stdout)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
