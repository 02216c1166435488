"""A whole step in f16 of a model with windows and sinks: gradients by the kernels, in the interpreter, and by twins."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mgraph.compiler import build_module
from mgraph.recipe import Recipe
from mgraph.runtime import v1
from tests.codegen.triton import interpret_step
from tests.codegen.triton.interpret_cases import BROKEN_INTERPRETER
from tests.codegen.triton.test_whole_step import emit, interpret


@pytest.mark.full
@pytest.mark.skipif(BROKEN_INTERPRETER, reason="the interpreter cannot run with this NumPy")
def test_gradients_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first moment of each parameter is its gradient, up to a factor. Nothing is scaled, so that f16 is enough."""
    module = build_module(Recipe(model="gpt-oss-tiny", precision="fp16", target="h100")).module
    assert emit(module, tmp_path) >= {"attention_fwd", "attention_bwd"}
    state, calls = torch.load(tmp_path / "inputs.pt")
    state["loss_scale"] = torch.ones_like(state["loss_scale"])
    torch.save((state, calls), tmp_path / "inputs.pt")
    interpret(tmp_path)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(v1, "kernels", v1.kernels)  # put back afterwards
    interpret_step.main(tmp_path, tmp_path / "twins.pt")
    (_, twins), (_, kernels) = (torch.load(tmp_path / f"{way}.pt") for way in ("twins", "kernels"))
    moments = [name for name in twins if name.endswith(".m")]
    assert "layers.0.attn.sinks.m" in moments and "layers.0.attn.k.weight.m" in moments
    for name in moments:
        want = twins[name].double()
        assert float((kernels[name].double() - want).norm() / want.norm()) <= 1e-2, name
