"""A step of a model of experts as emitted for a GPU: fused ops by twins, by torch's forms, and by kernels in Triton's
interpreter. One of training against the graph without the fusion in float64, one that is served against the class of
transformers."""

from __future__ import annotations

import json
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
from mgraph.ir.torch_bridge import to_torch_dtype
from mgraph.passes.fuse_experts import FuseExperts
from mgraph.recipe import Recipe
from mgraph.runtime import v1
from tests.codegen.triton import interpret_step
from tests.codegen.triton.interpret_cases import BROKEN_INTERPRETER
from tests.codegen.triton.test_whole_step import interpret, state_of
from tests.families.configs import eager, write_config

RECIPE = Recipe(model="moe-tiny", precision="fp16", target="h100", loss_scale=64.0)
FUSED = {"expert_glu_fwd", "expert_glu_bwd", "grouped_matmul", "grouped_outer", "moe_route_order", "moe_route_bwd"}
BATCH = {"tokens": (2, 9), "labels": (2, 9)}


def emit(
    module: Module, sites: KernelSites, state: dict[str, Tensor], batch: dict[str, Tensor], to: Path, entry: str
) -> set[str]:
    """Write what `interpret_step` needs for one call of an entry; the names of the ops that run kernels."""
    to.mkdir(exist_ok=True)
    (to / "step.py").write_text(step_text(module, sites))
    entries = build_kernels(sites.specs, to, archs=())
    (to / "manifest.json").write_text(json.dumps({"kernels": entries}))
    torch.save((state, [(entry, tuple(batch.values()))]), to / "inputs.pt")
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


@pytest.mark.skipif(BROKEN_INTERPRETER, reason="the interpreter cannot run with this NumPy")
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
    names = emit(module, sites, state, batch, tmp_path, "microbatch")
    assert way == "forms" or names >= FUSED, names
    assert way != "forms" or "rt.expert_glu_grad" in (tmp_path / "step.py").read_text()
    check(run_step(way, tmp_path, monkeypatch), exact, bound=1e-2)


def run_step(way: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Outputs and state of what `emit` wrote, by kernels or by torch."""
    if way == "kernels":
        interpret(directory)
    else:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        monkeypatch.setattr(v1, "kernels", v1.kernels)  # put back afterwards
        interpret_step.main(directory, directory / "kernels.pt")
    return torch.load(directory / "kernels.pt")


LENGTHS, PADDING, BLOCK, WIDTH = (7, 5), 4, 16, 4
"""Prompts of the requests, tokens of none, rows of a block of the cache, and blocks of a request."""


def served_inputs(module: Module) -> dict[str, Tensor]:
    """Two prompts as one step, filled up by tokens and a request; groups of layers have the same slots and blocks."""
    places = [torch.arange(length) for length in LENGTHS]
    blocks = torch.zeros(len(LENGTHS) + 1, WIDTH, dtype=torch.int32)
    blocks[:-1, 0] = torch.arange(1, 1 + len(LENGTHS))
    slots = [BLOCK * (1 + request) + place for request, place in enumerate(places)]
    none, total = torch.zeros(PADDING, dtype=torch.int64), sum(LENGTHS)
    prompts = torch.randint(256, (total,), generator=torch.Generator().manual_seed(1))
    found = {
        "tokens": torch.cat((prompts, none)),
        "positions": torch.cat((*places, none)),
        "slots": torch.cat((*slots, torch.arange(PADDING))),
        "starts": torch.tensor([0, *LENGTHS, 0], dtype=torch.int32).cumsum(0).to(torch.int32),
        "lengths": torch.tensor([*LENGTHS, 0], dtype=torch.int32),
        "blocks": blocks,
        "rows": torch.arange(total),
    }
    names = ["tokens", *(param.name for param in module.entry_function("step").params[1:])]
    return {name: found[name.rpartition("_")[0] if name[-1].isdigit() else name] for name in names}


@pytest.mark.skipif(BROKEN_INTERPRETER, reason="the interpreter cannot run with this NumPy")
@pytest.mark.parametrize(
    ("way", "family"),
    [
        ("twins", "qwen3-moe"),
        ("forms", "gpt-oss"),
        *(
            pytest.param(way, family, marks=pytest.mark.full)
            for way, family in (
                ("twins", "gpt-oss"),
                ("forms", "qwen3-moe"),
                ("twins", "deepseek-v3"),
                ("kernels", "qwen3-moe"),
                ("kernels", "gpt-oss"),
            )
        ),
    ],
)
def test_a_step_that_is_served(way: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of all tokens of two prompts: packed matrices in halves, and in pairs with biases."""
    model = eager(family, seed=3).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_((parameter * (1 if "norm" in name or parameter.dim() < 2 else 4)).half())
    recipe = Recipe(
        model=write_config(family, tmp_path / "model"),
        purpose="serve",
        precision="fp16",
        target="h100",
        max_length=BLOCK * WIDTH,
        block_size=BLOCK,
    )
    module = build_module(recipe).module
    given = dict(model.state_dict()) | dict(model.named_buffers())
    state = {
        name: torch.zeros(BLOCK * 4, *map(int, held.type.shape[1:]), dtype=torch.float16)
        if name.startswith("cache.")
        else given[name].to(to_torch_dtype(held.type.dtype))
        for name, held in module.state.items()
    }
    batch = served_inputs(module)
    sites = kernel_sites(module, gpu=way != "forms")
    names = emit(module, sites, state, batch, tmp_path, "step")
    fused = {"expert_glu_fwd", "expert_sum", "moe_route_order"}
    assert names >= fused if way != "forms" else not names & fused, names
    (logits,), *_ = run_step(way, tmp_path, monkeypatch)[0]
    with torch.no_grad():
        prompts = batch["tokens"].split([*LENGTHS, PADDING])[:-1]
        exact = torch.cat([model(tokens[None]).logits[0] for tokens in prompts])
    error = float((logits.double() - exact).norm() / exact.norm())
    assert error <= 1e-2, error
