"""A step of a model of experts as emitted for a GPU: fused ops by twins, by torch's forms, and by kernels in Triton's
interpreter, against the graph without the fusion in float64."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mgraph.codegen.kernel_sites import KernelSites, kernel_sites
from mgraph.codegen.step import step_text
from mgraph.codegen.triton import build_kernels
from mgraph.compiler import build_module
from mgraph.ir.graph import Module
from mgraph.ir.interpreter import run
from mgraph.passes.fuse_experts import FuseExperts
from mgraph.recipe import Recipe
from mgraph.runtime import v1
from tests.codegen.triton import interpret_step
from tests.codegen.triton.test_whole_step import interpret, state_of

RECIPE = Recipe(model="moe-tiny", precision="fp16", target="h100", loss_scale=64.0)
FUSED = {"expert_glu_fwd", "expert_glu_bwd", "grouped_matmul", "grouped_outer", "moe_route_order", "moe_route_bwd"}
BATCH = {"tokens": (2, 9), "labels": (2, 9)}


def emit(module: Module, sites: KernelSites, state: dict[str, Tensor], batch: dict[str, Tensor], to: Path) -> set[str]:
    """Write what `interpret_step` needs for one microbatch; the names of the ops that run kernels."""
    to.mkdir(exist_ok=True)
    entries = build_kernels(sites.specs, to, archs=())
    (to / "manifest.json").write_text(json.dumps({"kernels": entries}))
    (to / "step.py").write_text(step_text(module, sites))
    torch.save((state, [("microbatch", tuple(batch.values()))]), to / "inputs.pt")
    return {entry["name"].rpartition("_")[0] for entry in entries}


def check(found: Any, exact: dict[str, Any], bound: float) -> None:
    """Loss and sums of gradients."""
    outputs, state = found
    loss = exact["acc.loss_sum"]
    assert abs(float(outputs[0][0]) - float(loss)) <= bound * abs(float(loss))
    for name, want in exact.items():
        if name.endswith(".grad"):
            error = float((state[name].double() - want).norm() / want.norm())
            assert error <= bound, (name, error)


@pytest.mark.skipif(
    version("triton") < "3.7" and version("numpy") >= "2.5",
    reason="the interpreter of Triton before 3.7 makes numbers of arrays with a dim, which NumPy 2.5 no longer does",
)
@pytest.mark.parametrize("way", ["twins", "forms", pytest.param("kernels", marks=pytest.mark.full)])
def test_a_microbatch(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = build_module(RECIPE).module
    monkeypatch.setattr(FuseExperts, "run", lambda self, module, report: module)
    plain = build_module(RECIPE).module
    state = state_of(module)
    state["loss_scale"].fill_(RECIPE.loss_scale)
    batch = {name: torch.randint(256, shape) for name, shape in BATCH.items()}
    exact = run(plain, "microbatch", batch, state, lifted=True)[1]
    sites = kernel_sites(module, gpu=way != "forms")
    names = emit(module, sites, state, batch, tmp_path)
    assert way == "forms" or names >= FUSED, names
    assert way != "forms" or "rt.expert_glu_grad" in (tmp_path / "step.py").read_text()
    if way == "kernels":
        interpret(tmp_path)
    else:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        monkeypatch.setattr(v1, "kernels", v1.kernels)  # put back afterwards
        interpret_step.main(tmp_path, tmp_path / "kernels.pt")
    check(torch.load(tmp_path / "kernels.pt"), exact, bound=1e-2)
