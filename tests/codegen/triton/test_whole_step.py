"""A whole step as emitted for a GPU: all its kernels in Triton's interpreter give what their twins give."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mgraph.codegen.kernel_sites import kernel_sites
from mgraph.codegen.step import step_text
from mgraph.codegen.triton import build_kernels
from mgraph.compiler import build_module
from mgraph.ir.graph import Module, StateKind
from mgraph.ir.torch_bridge import to_torch_dtype
from mgraph.passes.joining import joined_states
from mgraph.recipe import Recipe
from mgraph.runtime import v1
from mgraph.runtime.state import lay_together
from tests.codegen.triton import interpret_step
from tests.codegen.triton.interpret_cases import BROKEN_INTERPRETER
from tests.sampling import sampled

BATCH, SEQUENCE = 2, 9
MODELS = ["dense-tiny", "gemma3-tiny", "qwen3-tiny", "gpt-oss-tiny", "moe-tiny"]


def state_of(module: Module) -> dict[str, torch.Tensor]:
    """Random weights and zeros, as the first step has them."""
    torch.manual_seed(0)
    made = {}
    for name, state in module.state.items():
        shape, dtype = [int(extent) for extent in state.type.shape], to_torch_dtype(state.type.dtype)
        drawn = state.kind in (StateKind.PARAM, StateKind.BUFFER)
        made[name] = (0.2 * torch.randn(shape)).to(dtype) if drawn else torch.zeros(shape, dtype=dtype)
    lay_together(made, joined_states(module))
    return made


def emit(module: Module, directory: Path) -> set[str]:
    """Write what `interpret_step` needs; the names of the ops that run kernels."""
    sites = kernel_sites(module, gpu=True)
    entries = build_kernels(sites.specs, directory, archs=())
    (directory / "manifest.json").write_text(json.dumps({"kernels": entries}))
    (directory / "step.py").write_text(step_text(module, sites))
    tokens, labels = torch.randint(256, (BATCH, SEQUENCE)), torch.randint(256, (BATCH, SEQUENCE))
    labels[0, :3] = -100
    calls: list[tuple[str, tuple[Any, ...]]] = [(name, (tokens, labels)) for name in ("microbatch", "evaluate")]
    calls.append(("finish", (torch.tensor(1e-2),)))
    torch.save((state_of(module), calls), directory / "inputs.pt")
    return {entry["name"].rpartition("_")[0] for entry in entries}


def interpret(directory: Path) -> None:
    """All entries with kernels, in a process of its own."""
    done = subprocess.run(
        [sys.executable, interpret_step.__file__, str(directory), str(directory / "kernels.pt")],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(BROKEN_INTERPRETER, reason="the interpreter cannot run with this NumPy")
@pytest.mark.parametrize("model", sampled(MODELS, 0, always=["dense-tiny"]))
def test_kernels_give_what_their_twins_give(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss, evaluation, norm of the gradients and all state after a step, within f32."""
    module = build_module(Recipe(model=model, precision="fp32", target="h100")).module
    assert emit(module, tmp_path) >= {"cross_entropy", "cross_entropy_fwd", "glu_fwd", "glu_bwd", "adamw"}
    interpret(tmp_path)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(v1, "kernels", v1.kernels)  # put back afterwards
    interpret_step.main(tmp_path, tmp_path / "twins.pt")
    (twin_outputs, twin_state), (outputs, state) = (torch.load(tmp_path / f"{way}.pt") for way in ("twins", "kernels"))
    for got, want in zip(outputs, twin_outputs, strict=True):
        for ours, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    for name, expected in twin_state.items():
        made = state[name]
        # The first update of AdamW is a sign: where a gradient is next to nothing, it may be the other one.
        scale = expected.double().norm().clamp_min(1e-20)
        bound = 1e-4 if made.is_floating_point() else 0.0
        assert float((made.double() - expected.double()).norm() / scale) <= bound, name
