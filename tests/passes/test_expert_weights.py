"""Which states are those of experts, in a model of ours and in one of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from mgraph.compiler import build_module
from mgraph.ir.graph import StateKind
from mgraph.passes.expert_weights import expert_states
from mgraph.recipe import Recipe
from tests.families.configs import write_config


@pytest.mark.parametrize("model", ["moe-tiny", "hf:qwen3-moe"])
def test_the_weights_of_grouped_products(model: str, tmp_path: Path) -> None:
    name = write_config(model.removeprefix("hf:"), tmp_path / "model") if model.startswith("hf:") else model
    module = build_module(Recipe(model=name, mesh="dp=1", arch="none")).module
    found = expert_states(module)
    params = {n for n in found if module.state[n].kind is StateKind.PARAM}
    # Of all parameters only these have three dims.
    expected = {n for n, s in module.state.items() if s.kind is StateKind.PARAM and len(s.type.shape) == 3}
    assert params == expected
    assert params
    assert found == params | {f"{n}.{ending}" for n in params for ending in ("grad", "m", "v")}
